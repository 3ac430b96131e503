"""A plugin: makes ``OneShot`` the default decoder of the models that it was made for."""

from one_shot import OneShot

from refusion_lit.decoding import register_decoder
from refusion_lit.types import ModelTraits


def one_shot_if_masks_alone(traits: ModelTraits) -> OneShot | None:
    """Return the decoder for causal models whose only predictions are masks."""
    return OneShot() if (traits.attention, traits.predictions) == ("causal", ("mask",)) else None


register_decoder(OneShot, one_shot_if_masks_alone)
