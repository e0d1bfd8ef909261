"""One arm of the demo, in a process of its own: LoRA training with stock PEFT or with peft_fastlora.

The arms differ in the configuration class and in nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from demo_data import batches, collate, encode_all, prompt_ids, read_pairs
from demo_measure import PeakMemory, SavedActivations, machine, versions
from demo_model import Settings, load_base, load_tokenizer
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging

PROBE_ROWS = 4  # rows of the data set whose logits are kept for the check in another process
ANSWER_TOKENS = 96


def config_class(arm: str) -> type:
    """The configuration class of an arm. Only the fast arm imports the package, so that the stock arm is stock."""
    if arm == "fast":
        from peft_fastlora import FastLoraConfig

        return FastLoraConfig
    from peft import LoraConfig

    return LoraConfig


def build_model(settings: Settings, arm: str) -> Any:
    """The base model with a new adapter on every linear layer, the same one for the same seed."""
    base = load_base(settings)
    torch.manual_seed(settings.seed)
    config = config_class(arm)(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        lora_dropout=settings.lora_dropout,
        use_dora=settings.use_dora,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def digest(state: dict[str, Tensor]) -> str:
    """A fingerprint of names and bytes: equal for equal adapters only."""
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def train(model: Any, tokenizer: Any, settings: Settings, arm: str) -> dict[str, Any]:
    """Train the adapter; returns the losses, the step times, the saved bytes of the first step and the peak."""
    rows = encode_all(tokenizer, read_pairs(settings.data), settings.max_length)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    torch.manual_seed(settings.seed)  # dropout: both arms draw the same masks
    peak = PeakMemory(model)
    optimizer = torch.optim.AdamW(trainable, lr=settings.learning_rate, weight_decay=0.0)
    saved = SavedActivations(model)
    losses, seconds, tokens = [], [], []
    order = batches(rows, tokenizer.pad_token_id, settings.batch_size, settings.steps, settings.seed)
    bar = tqdm(order, total=settings.steps, desc=f"{arm:>5}", unit="step")
    for step, batch in enumerate(bar):
        start = time.perf_counter()
        with saved if step == 0 else contextlib.nullcontext():
            loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU, too
        seconds.append(time.perf_counter() - start)
        tokens.append(int(batch["attention_mask"].sum()))
        bar.set_postfix(loss=f"{losses[-1]:.4f}")
        del loss
    return {
        "losses": losses,
        "step_seconds": seconds,
        # the first step warms up and carries the hooks that count
        "median_step_seconds": statistics.median(seconds[1:] or seconds),
        "saved_activation_mib": saved.mib,
        "peak_mib": peak.growth_mib(),
        "peak_method": peak.method,
        "tokens_per_step": statistics.mean(tokens),
        "rows": len(rows),
    }


@torch.no_grad()
def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The model's greedy answer."""
    ids = torch.tensor([prompt_ids(tokenizer, question)], device=model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()


@torch.no_grad()
def probe_logits(model: Any, tokenizer: Any, settings: Settings) -> Tensor:
    """Logits `[tokens, vocabulary]` of the first rows of the data set, in float32, without the padding."""
    rows = encode_all(tokenizer, read_pairs(settings.data), settings.max_length)[:PROBE_ROWS]
    batch = {name: tensor.to(model.device) for name, tensor in collate(rows, tokenizer.pad_token_id).items()}
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[batch["attention_mask"].bool()].float().cpu()


def show(model: Any, tokenizer: Any, settings: Settings, work: Path) -> dict[str, Any]:
    """What the trained fast model says; its logits go to a file, for the check in another process."""
    model.eval()
    pair = read_pairs(settings.data)[0]
    save_file({"logits": probe_logits(model, tokenizer, settings)}, work / "logits.safetensors")
    after = answer(model, tokenizer, pair["question"])
    # A new adapter changes nothing (B = 0), so the model without it is the model before training. Asking it only now
    # keeps 4-bit weights as they are: bitsandbytes may re-pack them on the CPU at the first call without gradients.
    with model.disable_adapter():
        before = answer(model, tokenizer, pair["question"])
    return {"question": pair["question"], "reference": pair["answer"], "before": before, "after": after}


def run_arm(settings: Settings, arm: str, output: Path, work: Path) -> dict[str, Any]:
    """Build, train and save; everything worth knowing about it as plain values."""
    tokenizer = load_tokenizer(settings)
    model = build_model(settings, arm)
    initial = digest(get_peft_model_state_dict(model))
    result = {"arm": arm, "initial_adapter": initial, **train(model, tokenizer, settings, arm)}
    result["trainable_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model.save_pretrained(output / f"adapter_{arm}")
    if arm == "fast":
        from peft_fastlora import fusion_report

        report = fusion_report(model)
        (output / "fusion_report.txt").write_text(f"{report}\n", encoding="utf-8")
        result["fusion"] = report.to_dict()
        result["answer"] = show(model, tokenizer, settings, work)
    elif "peft_fastlora" in sys.modules:
        raise RuntimeError("the stock arm has peft_fastlora loaded, so it would not be stock PEFT")
    return {**result, "versions": versions(), "machine": machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=("stock", "fast"))
    parser.add_argument("settings", help="JSON")
    parser.add_argument("output", type=Path, help="folder for what the user keeps")
    parser.add_argument("work", type=Path, help="folder for what the other processes of the demo need")
    args = parser.parse_args()
    logging.disable_progress_bar()
    result = run_arm(Settings.from_json(args.settings), args.arm, args.output, args.work)
    (args.work / f"{args.arm}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
