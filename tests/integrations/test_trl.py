"""TRL's SFTTrainer and GRPOTrainer take DuotoneCallback, as Trainer does: it converts, and resumes with equal bits."""

import pytest
import torch
from causal import assert_same_bits, batch, llama
from packages import ON_CPU, require

import duotone

trl = require("trl")
import datasets  # noqa: E402

from duotone.integrations.transformers import DuotoneCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def fit(path, tokenizer, checkpoint: str | None = None):
    rows = [{"input_ids": row.tolist()} for at in range(2) for row in batch(at)]
    arguments = trl.SFTConfig(
        str(path), max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
        use_cpu=ON_CPU, bf16=False, disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        llama(), arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[DuotoneCallback("nvfp4")],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.model


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"{i}": i for i in range(256)}, "0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", padding_side="left")


def test_sft_resumes_with_the_bits_of_a_run_that_went_on(tokenizer, tmp_path) -> None:
    whole = fit(tmp_path, tokenizer)
    assert "nvfp4" in str(duotone.plan(whole))
    again = fit(tmp_path / "again", tokenizer, str(tmp_path / "checkpoint-2"))
    assert_same_bits(dict(again.named_parameters()), dict(whole.named_parameters()))
    assert_same_bits(duotone.rng_state(again), duotone.rng_state(whole))
    assert torch.isfinite(next(whole.parameters())).all()


def odd_words(completions: list[str], **_: object) -> list[float]:
    return [sum(int(word) % 2 for word in text.split()) for text in completions]


def reinforce(path, tokenizer, checkpoint: str | None = None):
    torch.manual_seed(0)
    arguments = trl.GRPOConfig(
        str(path), max_steps=4, save_steps=2, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=8, learning_rate=1e-2, report_to=[], use_cpu=ON_CPU, bf16=False, disable_tqdm=True,
        seed=3,
    )  # fmt: skip
    prompts = datasets.Dataset.from_list([{"prompt": "5 7 9"}, {"prompt": "11 13 15"}] * 4)
    trainer = trl.GRPOTrainer(
        llama(), odd_words, args=arguments, train_dataset=prompts, processing_class=tokenizer,
        callbacks=[DuotoneCallback("nvfp4")],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.model


def test_grpo_resumes_with_the_bits_of_a_run_that_went_on(tokenizer, tmp_path) -> None:
    """Its rollouts draw from the policy that it trains."""
    whole = reinforce(tmp_path, tokenizer)
    assert "nvfp4" in str(duotone.plan(whole))
    again = reinforce(tmp_path / "again", tokenizer, str(tmp_path / "checkpoint-2"))
    assert_same_bits(dict(again.named_parameters()), dict(whole.named_parameters()))


def test_rollouts_have_the_precision_of_training() -> None:
    """A token's logits are the same one by one, with a cache, and in a whole sequence: scales are those of rows."""
    plain, policy = llama(), duotone.convert(llama(), "mxfp8")
    prompt = torch.tensor([[5, 7, 9, 11]])
    rollout = policy.generate(
        prompt, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    stepwise = torch.stack(rollout.logits, 1)
    whole, exact = (model(rollout.sequences).logits[:, 3:-1] for model in (policy, plain))
    assert torch.allclose(stepwise, whole, atol=1e-5)
    assert (whole - exact).norm() / exact.norm() > 1e-3
