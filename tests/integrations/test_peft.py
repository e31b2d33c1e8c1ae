"""LoRA and DoRA of PEFT over quantized parameters, in either order: adapters train, save and merge."""

import pytest
import torch
from causal import batch, llama
from packages import require

import duotone

peft = require("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT
ORDERS = pytest.mark.parametrize("first", ["peft", "duotone"])


def quantize(model):
    duotone.convert(model, "mxfp8")
    return duotone.convert_parameters(model, "mxfp8")


def adapted(model, **options):
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], **options))


def build(first: str, **options):
    return quantize(adapted(llama(), **options)) if first == "peft" else adapted(quantize(llama()), **options)


@ORDERS
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_stay_in_high_precision_and_train(first: str, dora: bool) -> None:
    model = build(first, use_dora=dora)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        model(input_ids=batch(step), labels=batch(step)).loss.backward()
        optimizer.step()
    after = dict(model.named_parameters())
    assert before and all(type(after[name].data) is torch.Tensor for name in before)
    assert not [name for name, p in before.items() if torch.equal(p, after[name])]
    base = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    assert isinstance(base.weight, duotone.QuantizedTensor) and base.weight.grad is None


@ORDERS
def test_adapters_are_saved_without_the_base_and_come_back(first: str, tmp_path) -> None:
    model = build(first).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(quantize(llama()), tmp_path).eval()
    assert torch.equal(model(batch(0)).logits, again(batch(0)).logits)


def test_a_merge_writes_the_planes_of_the_base() -> None:
    model = build("duotone").eval()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.lora_B.default.weight, std=0.1)
    values = layer.base_layer.weight.dequantize() + layer.get_delta_weight("default")
    base = layer.base_layer.weight
    merged = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    assert isinstance(merged, duotone.QuantizedTensor)
    assert torch.equal(merged.rowwise_codes, base.quantizer.quantize(values).rowwise_codes)
