"""Lightning: a plugin converts under Trainer and Fabric, and runs resume with the bits of one that went on."""

import pytest
import torch
from packages import DEVICE, require
from torch import nn

import duotone

lightning = require("lightning")
pl = lightning.pytorch
from duotone.integrations.lightning import DuotonePrecision, FabricDuotonePrecision  # noqa: E402

RECIPES = ["mxfp8", "nvfp4", "fp8-delayed"]
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Lightning's own, of torch and of Python
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*of this update is lost"),  # these optimizers keep no masters
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty"),
]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def rows() -> torch.Tensor:
    return torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1))


class Module(pl.LightningModule):
    def __init__(self, recipe: str = "", masters: bool = False) -> None:
        super().__init__()
        self.layers, self.recipe, self.masters = layers(), recipe, masters

    def configure_model(self) -> None:
        if self.recipe:
            duotone.convert_parameters(duotone.convert(self, self.recipe), self.recipe)

    def training_step(self, item: int, index: int) -> torch.Tensor:
        return self.loss(
            rows()[self.global_step].to(self.device)
        )  # whatever Lightning does with the loader when a run resumes

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).square().mean()

    def test_step(self, x: torch.Tensor, index: int) -> None:
        assert torch.isfinite(self.layers(x)).all()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return (duotone.optim.AdamW if self.masters else torch.optim.AdamW)(self.parameters(), lr=1e-2)


def fit(plugin, path, model: Module | None = None, checkpoint: str | None = None):
    saver = pl.callbacks.ModelCheckpoint(path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = pl.Trainer(
        accelerator=DEVICE, plugins=plugin, max_steps=4, callbacks=[saver], logger=False, barebones=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=path,
    )  # fmt: skip
    model = Module() if model is None else model
    trainer.fit(model, torch.utils.data.DataLoader(range(4), batch_size=None), ckpt_path=checkpoint)
    return trainer, model


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, as planes if they are quantized, with seeds and delayed scales."""
    tensors = {}
    for name, parameter in model.named_parameters():
        parts = parameter.parts if isinstance(parameter, duotone.QuantizedTensor) else [parameter.detach()]
        tensors |= {f"{name}.{at}": part for at, part in enumerate(parts)}
    return tensors | duotone.rng_state(model) | duotone.recipe_state(model)


def assert_same(left: nn.Module, right: nn.Module) -> None:
    one, other = bits(left), bits(right)
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("recipe", RECIPES)
def test_trainer_gives_the_bits_of_a_plain_loop_and_resumes_with_them(recipe: str, tmp_path) -> None:
    _, whole = fit(DuotonePrecision(recipe), tmp_path)
    loop = duotone.convert(Module(), recipe).to(DEVICE)
    optimizer = loop.configure_optimizers()
    for x in rows().to(DEVICE):
        optimizer.zero_grad()
        loop.loss(x).backward()
        optimizer.step()
    assert_same(whole, loop.to(whole.device))  # Lightning moves it back
    _, resumed = fit(DuotonePrecision(recipe), tmp_path / "again", checkpoint=f"{tmp_path}/step=2.ckpt")
    assert_same(resumed, whole)


@pytest.mark.parametrize("masters", [False, True])
def test_planes_of_quantized_parameters_are_in_the_checkpoint(masters: bool, tmp_path) -> None:
    runs = [Module("nvfp4", masters) for _ in range(2)]
    fit(DuotonePrecision("nvfp4"), tmp_path, runs[0])
    fit(DuotonePrecision("nvfp4"), tmp_path / "again", runs[1], f"{tmp_path}/step=2.ckpt")
    assert isinstance(runs[0].layers[0].weight, duotone.QuantizedTensor)
    assert_same(runs[1], runs[0])


def test_checkpoints_are_those_of_plain_models_and_load_into_running_ones(tmp_path) -> None:
    precision = DuotonePrecision("fp8-delayed")
    trainer, model = fit(precision, tmp_path)
    assert repr(precision) == "DuotonePrecision(fp8-delayed)"
    assert duotone.recipe_state(model)
    plain = Module.load_from_checkpoint(f"{tmp_path}/step=4.ckpt")
    weight = model.layers[0].weight
    assert type(plain.layers[0]) is nn.Linear and torch.equal(plain.layers[0].weight.to(weight.device), weight)
    loader = torch.utils.data.DataLoader(list(rows()), batch_size=None)
    trainer.test(model, loader, ckpt_path=f"{tmp_path}/step=2.ckpt", verbose=False)
    early = torch.load(f"{tmp_path}/step=2.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(model.layers[2].weight.cpu(), early["layers.2.weight"].cpu())


def test_checkpoints_without_states_or_of_another_recipe_are_one_line(tmp_path) -> None:
    fit([], tmp_path / "plain")
    with pytest.raises(duotone.UserError, match=r"^no DuotonePrecision saved the seeds and scales[^\n]*$"):
        fit(DuotonePrecision("mxfp8"), tmp_path, checkpoint=f"{tmp_path}/plain/step=2.ckpt")
    fit(DuotonePrecision("mxfp8"), tmp_path / "mxfp8")
    with pytest.raises(duotone.UserError, match=r"^the checkpoint has planes of other parameters or formats[^\n]*$"):
        fit(DuotonePrecision("mxfp8"), tmp_path, Module("mxfp8"), f"{tmp_path}/mxfp8/step=2.ckpt")
    with pytest.raises(
        duotone.UserError, match=r"^the checkpoint was saved under mxfp8, and the model follows fp8-cur"
    ):
        fit(DuotonePrecision("fp8-current"), tmp_path, checkpoint=f"{tmp_path}/mxfp8/step=2.ckpt")
    with pytest.raises(duotone.UserError, match=r"^[^\n]*mxfp9[^\n]*$"):
        DuotonePrecision("mxfp9")


# Fabric


def setup(recipe: str):
    plugin = FabricDuotonePrecision(recipe)
    fabric = lightning.Fabric(accelerator=DEVICE, plugins=plugin)
    plain = layers()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    return fabric, model, optimizer, {"model": model, "optimizer": optimizer, "precision": plugin}


def steps(fabric, model, optimizer, inputs: torch.Tensor) -> list[float]:
    losses = []
    for x in inputs.to(fabric.device):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_fabric_resumes_with_the_bits_of_a_run_that_went_on(recipe: str, tmp_path) -> None:
    fabric, model, optimizer, state = setup(recipe)
    steps(fabric, model, optimizer, rows()[:2])
    fabric.save(tmp_path / "state", state)
    losses = steps(fabric, model, optimizer, rows()[2:])
    fresh = setup(recipe)
    fresh[0].load(tmp_path / "state", fresh[3])
    assert steps(*fresh[:3], rows()[2:]) == losses
    assert_same(fresh[1].module, model.module)
    fabric.load(tmp_path / "state", state)  # into a model that has delayed scales
    assert steps(fabric, model, optimizer, rows()[2:]) == losses
    saved = torch.load(tmp_path / "state", weights_only=True)
    layers().load_state_dict(saved["model"])


def test_a_checkpoint_of_fewer_models_is_one_line(tmp_path) -> None:
    with pytest.raises(duotone.UserError, match=r"^the checkpoint is of 0 models, and 1 were set up$"):
        setup("mxfp8")[3]["precision"].load_state_dict({})


class Normalized(Module):
    """A model with buffers of its own, behind a linear that gets buffers of Duotone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(64))


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_averages_of_weights_pair_the_buffers_of_one_kind_of_model(recipe: str) -> None:
    """Lightning copies the model before a plugin converts it, and pairs both by the order of their buffers."""

    def train(model: Module) -> Module:
        trainer = pl.Trainer(
            accelerator=DEVICE, plugins=DuotonePrecision(recipe), max_steps=4, barebones=False, logger=False,
            callbacks=[pl.callbacks.EMAWeightAveraging(decay=0.5)], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(range(4), batch_size=None))
        return model

    with pytest.raises(
        duotone.UserError, match=r"^EMAWeightAveraging copied the model [^\n]*; call duotone\.convert[^\n]*$"
    ):
        train(Normalized())
    assert train(duotone.convert(Normalized(), recipe)).layers[1].num_batches_tracked > 0
