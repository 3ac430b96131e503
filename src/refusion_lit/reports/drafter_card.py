"""The card of an exported drafter."""

from __future__ import annotations

from pathlib import Path

import yaml

from refusion_lit.modeling.drafter import DrafterOrigin
from refusion_lit.reports.model_card import transformers_loading
from refusion_lit.version import __version__


def drafter_card(name: str, origin: DrafterOrigin) -> str:
    """Return a card in Markdown that says what the directory is and how to use it.

    Args:
        name: The directory or repository.
        origin: The drafter's options and base.
    """
    base, options = origin.base or "MODEL", origin.options
    front = {"library_name": "refusion-lit", "pipeline_tag": "text-generation", "tags": ["speculative-decoding"]}
    if origin.base and not Path(origin.base).exists():  # a local path means nothing on another machine
        front["base_model"] = origin.base
    return f"""---
{yaml.safe_dump(front, sort_keys=False).strip()}
---

# {Path(name).name}

A drafter for `{base}`, written by refusion-lit {__version__}: {options.num_masks} learnt masks and adapters of rank
{options.rank} that act at these masks only. The model drafts with it and verifies with its own next-token predictions,
so that the text is the model's own, in fewer forwards. It is refused with any other model.

```console
refusion-lit generate --ckpt_path {base} --draft {name} --prompt "..."
```

```python
import refusion_lit
from refusion_lit.decoding import SelfSpeculative

model = refusion_lit.load({base!r}, draft={name!r})
print(model.generate(["..."], decoder=SelfSpeculative())[0].text)
```

The directory holds its decoder in `custom_generate/generate.py`, for transformers alone: greedy, one prompt at a time.

```python
{transformers_loading(base)}
output = model.generate(input_ids, custom_generate={name!r}, trust_remote_code=True, draft={name!r}, max_new_tokens=64)
print(tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True))
```

The adapters are no plain low-rank update: merged into the model, or applied to every token, they would change its text.
"""
