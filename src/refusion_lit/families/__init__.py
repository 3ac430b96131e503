"""Systems other than ReFusion, one folder or file each: decoder, objective and published checkpoints side by side."""
