"""Small models of transformers with random weights, and bytes that they can learn."""

import torch

from later import Later

transformers = Later("transformers")

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TEXT = torch.frombuffer(bytearray(b"each plane of a block has a scale and a format; " * 40), dtype=torch.uint8)


def llama(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes))


def mixtral(**changes):
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES | {"num_local_experts": 4} | changes))


def batch(step, count=4, context=32):
    """Tokens of one step, int64 (count, context)."""
    starts = torch.randint(0, len(TEXT) - context, (count,), generator=torch.Generator().manual_seed(step))
    return TEXT[starts[:, None] + torch.arange(context)].long()


def gradients(model, tokens):
    """The loss, and the gradient of every parameter by name."""
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def train(model, steps):
    """The losses of a few steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]
