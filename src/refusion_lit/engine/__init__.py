"""The engine: one prompt becomes text. Decoders ask for forwards; the engine batches, counts, streams and cuts."""
