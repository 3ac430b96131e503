"""Systems other than ReFusion, one folder each: decoder, objective and published checkpoints side by side."""
