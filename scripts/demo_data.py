"""Question/answer pairs as JSON lines, and the batches that are trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the label that transformers leaves out of the loss


def read_pairs(path: str | Path) -> list[dict[str, str]]:
    """Read a file with one `{"question": ..., "answer": ...}` a line.

    Raises:
        ValueError: a line is something else, or there is none; names the file and the line.
    """
    pairs = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            pairs.append({key: _text(row[key]) for key in ("question", "answer")})
        except (ValueError, KeyError, TypeError) as error:
            expected = 'an object with the texts "question" and "answer"'
            raise ValueError(f"{path}, line {number}: expected {expected} ({error!r})") from error
    if not pairs:
        raise ValueError(f"{path} holds no question/answer pair")
    return pairs


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"not a text: {value!r}")
    return value


def prompt_of(tokenizer: Any, question: str) -> str:
    """The text that the model continues with its answer."""
    if tokenizer.chat_template is None:
        return f"Question: {question}\nAnswer: "
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _answer_of(tokenizer: Any, pair: dict[str, str], prompt: str) -> str:
    if tokenizer.chat_template is None:
        return pair["answer"] + tokenizer.eos_token
    messages = [{"role": "user", "content": pair["question"]}, {"role": "assistant", "content": pair["answer"]}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    # a template may write the prompt differently once there is an answer; then the plain end of turn has to do
    return text[len(prompt) :] if text.startswith(prompt) else pair["answer"] + tokenizer.eos_token


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """The prompt's tokens. A chat template writes its special tokens itself."""
    plain = tokenizer.chat_template is None
    return list(tokenizer(prompt_of(tokenizer, question), add_special_tokens=plain)["input_ids"])


def encode(tokenizer: Any, pair: dict[str, str], max_length: int) -> tuple[list[int], list[int]]:
    """Tokens and labels of one pair; only the answer has labels, so only the answer is learned."""
    prompt = prompt_ids(tokenizer, pair["question"])
    text = _answer_of(tokenizer, pair, prompt_of(tokenizer, pair["question"]))
    answer = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return (prompt + answer)[:max_length], ([IGNORED] * len(prompt) + answer)[:max_length]


def encode_all(tokenizer: Any, pairs: list[dict[str, str]], max_length: int) -> list[tuple[list[int], list[int]]]:
    """Encode all pairs, without those whose prompt alone fills `max_length`.

    Raises:
        ValueError: no pair is left.
    """
    encoded = [encode(tokenizer, pair, max_length) for pair in pairs]
    trainable = [(tokens, labels) for tokens, labels in encoded if any(label != IGNORED for label in labels)]
    if not trainable:
        raise ValueError(f"no answer begins within {max_length} tokens: raise --max-length")
    return trainable


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, Tensor]:
    """Pad rows on the right to the longest of them."""
    longest = max(len(tokens) for tokens, _ in rows)
    missing = [longest - len(tokens) for tokens, _ in rows]
    columns = list(zip(rows, missing, strict=True))
    return {
        "input_ids": torch.tensor([tokens + [pad] * n for (tokens, _), n in columns]),
        "attention_mask": torch.tensor([[1] * len(tokens) + [0] * n for (tokens, _), n in columns]),
        "labels": torch.tensor([labels + [IGNORED] * n for (_, labels), n in columns]),
    }


def batches(
    rows: list[tuple[list[int], list[int]]], pad: int, batch_size: int, steps: int, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Yield `steps` batches; every pass over the rows is in a new order, which depends on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch_size:
            order += torch.randperm(len(rows), generator=generator).tolist()
        chosen, order = order[:batch_size], order[batch_size:]
        yield collate([rows[index] for index in chosen], pad)
