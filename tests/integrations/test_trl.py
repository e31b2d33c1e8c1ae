"""TRL's SFTTrainer takes DuotoneCallback, as Trainer does: it converts, and resumes with equal bits."""

import pytest
import torch
from causal import assert_same_bits, batch, llama
from packages import require

import duotone

trl = require("trl")
import datasets  # noqa: E402

from duotone.integrations.transformers import DuotoneCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def fit(path, tokenizer, checkpoint: str | None = None):
    rows = [{"input_ids": row.tolist()} for at in range(2) for row in batch(at)]
    arguments = trl.SFTConfig(
        str(path), max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
        use_cpu=True, bf16=False, disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        llama(), arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[DuotoneCallback("nvfp4")],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.model


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"{i}": i for i in range(256)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "0")), pad_token="0", eos_token="1"
    )


def test_sft_resumes_with_the_bits_of_a_run_that_went_on(tokenizer, tmp_path) -> None:
    whole = fit(tmp_path, tokenizer)
    assert "nvfp4" in str(duotone.plan(whole))
    again = fit(tmp_path / "again", tokenizer, str(tmp_path / "checkpoint-2"))
    assert_same_bits(dict(again.named_parameters()), dict(whole.named_parameters()))
    assert_same_bits(duotone.rng_state(again), duotone.rng_state(whole))
    assert torch.isfinite(next(whole.parameters())).all()
