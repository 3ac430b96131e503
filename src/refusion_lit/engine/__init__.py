"""The engine turns prompts into text. Decoders request forwards; the engine batches, counts, streams and cuts."""
