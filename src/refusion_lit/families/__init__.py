"""Model families besides ReFusion: a folder or file holds a family's decoder, objective and checkpoint formats."""
