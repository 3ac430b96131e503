"""What the stages of a run do and remember: training, validation, and evaluation (test and prediction).

Plain objects, made anew for each run and held by the LightningModule, which they know nothing of.
"""
