"""Model families besides ReFusion: a folder or file holds decoder, objective and checkpoint formats of a family."""
