"""Models from configuration files: which are planned without Python, with which batch, and which are refused."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.example_counts import examples

pytest.importorskip("transformers")

import transformers

from benchmarks.zoo_configs import tiny_config
from partitioner import (
    CapacityError,
    CaptureError,
    Constraints,
    Engine,
    HubError,
    InputsError,
    Lora,
    Plan,
    PretrainedError,
    RemoteCodeError,
    Topology,
    UnsupportedError,
    check_fit,
    load_pretrained,
    partition,
    partition_pretrained,
    run_local,
    run_reference,
    save_adapters,
)
from partitioner.plans.figures import candidate_text
from partitioner.plans.verify import TOLERANCE, compare
from partitioner.pretrained.adapters import AdaptedLinear, add_adapters
from partitioner.pretrained.configuration import Configuration, read_configuration
from partitioner.pretrained.load import _choose_class, _list_classes
from partitioner.units import format_plural
from tests.helpers.command_line import invoke

pytestmark = pytest.mark.usefixtures("without_baselines")

# Type of configuration -> the task that follows from it, and the shape of one sample of the main input where the length
# is 16: small configurations have images of 64 x 64 pixels and audio of 64 frames.
FAST = {"llama": "causal", "bert": "masked", "t5": "seq2seq", "vit": "image", "audio-spectrogram-transformer": "audio"}
SLOW = dict.fromkeys(
    "gpt2 mistral qwen3 gemma2 phi3 olmo2 falcon bloom opt gpt_neox mixtral deepseek_v3".split(), "causal"
)
SLOW |= dict.fromkeys("bart mbart pegasus marian blenderbot".split(), "seq2seq")
SLOW |= dict.fromkeys("roberta electra albert distilbert mpnet deberta-v2".split(), "masked")
SLOW |= dict.fromkeys("deit beit dinov2 convnext resnet".split(), "image")
SLOW |= dict.fromkeys("whisper wav2vec2 hubert".split(), "audio")


def write_config(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write a small configuration of the type into ``folder``, with other fields where ``changes`` has them."""
    tiny_config(model_type).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def check_planned(folder: Path, model_type: str, task: str) -> None:
    config = write_config(folder, model_type)
    length = () if model_type in ("wav2vec2", "hubert") else ("--seq", 16)  # so few of a waveform are no frame
    result = invoke("plan", config, "--topology", "local:2", *length, "--batch", 4, "-o", folder / "plan.json")
    assert result.exit_code == 0, result.output
    plan = Plan.load(folder / "plan.json")
    assert plan.global_batch == 4
    assert plan.program.loss is not None
    assert plan.weights == ""  # there are none in the folder
    found = load_pretrained(config, seq=16 if length else None, batch=4)
    assert found.task == task
    assert all(p.is_meta for p in found.model.parameters())


@pytest.mark.parametrize(("model_type", "task"), FAST.items(), ids=FAST)
def test_a_configuration_is_planned_without_python(tmp_path: Path, model_type: str, task: str) -> None:
    check_planned(tmp_path, model_type, task)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "task"), SLOW.items(), ids=SLOW)
def test_configurations_of_other_types_are_planned(tmp_path: Path, model_type: str, task: str) -> None:
    check_planned(tmp_path, model_type, task)


# --- what follows from the fields -------------------------------------------------------------------------------------


def test_the_class_is_that_of_the_architectures_or_of_the_task(tmp_path: Path) -> None:
    config = write_config(tmp_path, "bert")
    assert type(load_pretrained(config, batch=2).model).__name__ == "BertForMaskedLM"
    write_config(tmp_path, "bert", architectures=["BertLMHeadModel"], is_decoder=True)
    named = load_pretrained(config, batch=2)
    assert (type(named.model).__name__, named.task, named.notes) == ("BertLMHeadModel", "causal", ())
    assert load_pretrained(config, batch=2, task="masked").task == "masked"
    write_config(tmp_path, "bert", architectures=["BertForQuestionAnswering"])
    (note,) = load_pretrained(config, batch=2).notes
    assert "BertForQuestionAnswering" in note and "BertForMaskedLM" in note


@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        ("bert", "BertForSequenceClassification", (4,)),
        ("bert", "BertForTokenClassification", (4, 16)),
        ("llama", "LlamaForSequenceClassification", (4,)),
        ("canine", "CanineForSequenceClassification", (4,)),
    ],
)
def test_classifiers_of_texts_are_planned_if_they_are_named(
    tmp_path: Path, kind: str, name: str, labels: tuple[int, ...]
) -> None:
    config = write_config(
        tmp_path, kind, architectures=[name], pad_token_id=0, id2label={str(i): str(i) for i in range(3)}
    )
    found = load_pretrained(config, batch=4, seq=16)
    assert (type(found.model).__name__, found.task, found.why) == (name, "text", "as architectures says")
    assert {n: tuple(x.shape) for n, x in found.inputs.items()} == {"input_ids": (4, 16), "labels": labels}
    plan = partition_pretrained(config, Topology.local(2), batch=4, seq=16)
    assert plan.global_batch == 4 and plan.program.loss is not None


def test_a_classifier_of_texts_is_the_only_class_of_its_type_or_is_asked_for(tmp_path: Path) -> None:
    assert load_pretrained(write_config(tmp_path, "bert"), batch=2).task == "masked"
    assert type(load_pretrained(tmp_path, batch=2, task="text").model).__name__ == "BertForSequenceClassification"
    assert load_pretrained(write_config(tmp_path / "only", "canine"), batch=2).task == "text"


# Type of a configuration without architectures -> class and task that follow, or the tasks that an error names. clip to
# metaclip_2 are pairs of encoders, blip and blip-2 both pairs and captioners, seamless_m4t reads text or speech.
FOLLOWS = {
    "clip": ("CLIPModel", "contrastive"),
    "siglip": ("SiglipModel", "contrastive"),
    "metaclip_2": ("MetaClip2Model", "contrastive"),
    "altclip": ("AltCLIPModel", "contrastive"),
    "bart": ("BartForConditionalGeneration", "seq2seq"),
    "whisper": ("WhisperForConditionalGeneration", "audio"),
    "roberta": ("RobertaForMaskedLM", "masked"),
    "xlm": ("XLMWithLMHeadModel", "masked"),
    "voxtral": ("VoxtralForConditionalGeneration", "seq2seq"),
    "llama": ("LlamaForCausalLM", "causal"),
}
OPEN = {
    "blip": ("causal", "contrastive"),
    "blip-2": ("causal", "contrastive"),
    "perceiver": ("masked", "image"),
    "shieldgemma2": ("causal", "image"),
    "seamless_m4t": ("seq2seq", "audio"),
}


@pytest.mark.parametrize(("model_type", "chosen"), FOLLOWS.items(), ids=FOLLOWS)
def test_without_architectures_the_task_follows_from_the_type_and_is_said(
    tmp_path: Path, model_type: str, chosen: tuple[str, str]
) -> None:
    found = load_pretrained(write_config(tmp_path, model_type, architectures=None), batch=2)
    assert (type(found.model).__name__, found.task) == chosen
    assert found.notes[0].startswith(
        f"The configuration has no architectures. The plan is for {chosen[0]} (task {chosen[1]}): {found.why}"
    )


@pytest.mark.parametrize(("model_type", "tasks"), OPEN.items(), ids=OPEN)
def test_a_type_with_several_tasks_asks_for_one(tmp_path: Path, model_type: str, tasks: tuple[str, ...]) -> None:
    config = write_config(tmp_path, model_type, architectures=None)
    with pytest.raises(PretrainedError) as error:
        load_pretrained(config, batch=2)
    assert f"give --task {' or --task '.join(tasks)} (task= in Python)" in str(error.value)
    assert "or name the class in the field architectures" in str(error.value)
    assert load_pretrained(config, task=tasks[0], batch=2).task == tasks[0]  # type: ignore[arg-type]


def test_every_type_of_transformers_has_one_task_or_an_error_that_names_the_choices() -> None:
    """Of all types that have classes for several tasks, none is decided by the order of a table."""
    several = 0
    for model_type in transformers.CONFIG_MAPPING:
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
        except Exception:  # a type without default fields
            continue
        every = _list_classes(config)
        tasks = {task for _, _, task in every} - {"text"}
        if len(tasks) < 2:
            continue
        several += 1
        found = Configuration(config, "config.json", None, (), {}, ())
        choice, refused = None, ""
        try:
            choice = _choose_class(found, None)
        except PretrainedError as error:
            refused = str(error)
        if choice is None:
            assert all(f"--task {task}" in refused for task in tasks), model_type
            continue
        said = ("is_encoder_decoder is true", "is_decoder is ", "is the only class", "is the class of the type")
        assert any(words in choice.why for words in said), (model_type, choice.why)
        assert choice.labels != "class", model_type  # a classifier on a part of the model
    assert several > 40


def test_architectures_in_a_class_of_several_tasks_are_as_the_type_says(tmp_path: Path) -> None:
    config = write_config(tmp_path, "bart", architectures=["BartForConditionalGeneration"])
    found = load_pretrained(config, batch=2)
    assert (found.task, found.why, found.notes) == ("seq2seq", "as architectures says", ())
    write_config(tmp_path, "clip", architectures=["CLIPForImageClassification"])
    assert load_pretrained(tmp_path, batch=2).task == "image"


# Type of a configuration, a class that is no task's -> the inputs that it is planned with for inference
UNTRAINED = {
    ("dinov3_vit", "DINOv3ViTModel"): {"pixel_values": (2, 3, 64, 64)},
    ("sam", "SamModel"): {"pixel_values": (2, 3, 64, 64)},
    ("canine", "CanineForQuestionAnswering"): {"input_ids": (2, 64)},
    ("xclip", "XCLIPModel"): {"input_ids": (2, 64), "pixel_values": (2, 8, 3, 64, 64)},
    ("patchtst", "PatchTSTForPrediction"): {"past_values": (2, 32, 1)},
    ("timesfm", "TimesFmModelForPrediction"): {"past_values": (2, 64)},
    ("mimi", "MimiModel"): {"input_values": (2, 1, 160_000)},
}


@pytest.mark.parametrize(("kind", "inputs"), UNTRAINED.items(), ids=[name for _, name in UNTRAINED])
def test_a_class_of_no_known_task_is_planned_for_inference(
    tmp_path: Path, kind: tuple[str, str], inputs: dict[str, tuple[int, ...]]
) -> None:
    config = write_config(tmp_path, kind[0], architectures=[kind[1]])
    found = load_pretrained(config, batch=2, objective="infer")
    assert (type(found.model).__name__, found.task, found.model.training) == (kind[1], "inference", False)
    assert {name: tuple(tensor.shape) for name, tensor in found.inputs.items()} == inputs
    with pytest.raises(PretrainedError, match=f"plan {kind[1]} for inference .--objective infer., or give FILE.py"):
        load_pretrained(config, batch=2)


@pytest.mark.parametrize(
    ("kind", "name", "inputs"),
    [
        ("clip_text_model", "CLIPTextModel", {"input_ids": (2, 64)}),
        ("dinov3_vit", "DINOv3ViTModel", {"pixel_values": (2, 3, 64, 64)}),
    ],
)
def test_a_type_without_a_task_is_planned_for_inference_by_its_own_class(
    tmp_path: Path, kind: str, name: str, inputs: dict[str, tuple[int, ...]]
) -> None:
    found = load_pretrained(write_config(tmp_path, kind), batch=2, objective="infer")
    assert type(found.model).__name__ == name
    assert {name: tuple(tensor.shape) for name, tensor in found.inputs.items()} == inputs


def test_a_type_without_a_task_is_no_reason_to_give_another_task(tmp_path: Path) -> None:
    config = write_config(tmp_path, "dinov3_vit")
    with pytest.raises(
        PretrainedError, match=r"it has: none\); plan DINOv3ViTModel for inference .--objective infer., or"
    ):
        load_pretrained(config, batch=2)
    with pytest.raises(
        PretrainedError, match=r"no bert model for the task image .it has: masked, causal, text\); give --task"
    ):
        load_pretrained(write_config(tmp_path / "bert", "bert"), batch=2, task="image")


@pytest.mark.parametrize(("kind", "sizes"), [("siglip2", "spatial_shapes"), ("glm4v_vision", "grid_thw")])
def test_a_model_whose_shapes_are_values_of_an_input_is_refused(tmp_path: Path, kind: str, sizes: str) -> None:
    with pytest.raises(PretrainedError, match=f"sizes of images from the values of {sizes}.* give FILE.py:FUNCTION"):
        load_pretrained(write_config(tmp_path, kind), batch=2, objective="infer")


def test_a_text_is_planned_without_images_whose_shapes_are_values(tmp_path: Path) -> None:
    found = load_pretrained(write_config(tmp_path, "lfm2_vl"), batch=2)
    assert {"input_ids", "labels"} == found.inputs.keys()
    assert any("The batch has no images" in note for note in found.notes)


def test_patches_have_their_places_before_the_pixels(tmp_path: Path) -> None:
    config = write_config(tmp_path, "pix2struct")
    found = load_pretrained(config, seq=16, batch=2, values=True)
    patches = found.inputs["flattened_patches"]
    assert tuple(patches.shape) == (2, 16, 2 + found.model.config.vision_config.patch_embed_hidden_size)
    assert float(patches.min()) >= 0 and float(patches.max()) < 1  # rows and columns that a model has
    assert found.model(**found.inputs).loss.isfinite()


def test_images_of_a_text_come_with_all_that_forward_needs(tmp_path: Path) -> None:
    found = load_pretrained(write_config(tmp_path, "idefics"), batch=2)
    assert tuple(found.inputs["pixel_values"].shape)[:2] == (2, 1)
    assert tuple(found.inputs["image_attention_mask"].shape) == (*found.inputs["input_ids"].shape, 1)
    found = load_pretrained(write_config(tmp_path / "clip", "instructblipvideo"), batch=2)
    assert {"input_ids", "pixel_values", "qformer_input_ids", "labels"} == found.inputs.keys()
    found = load_pretrained(write_config(tmp_path / "list", "idefics2"), batch=2)  # leaves out images of zeros
    assert {"input_ids", "labels"} == found.inputs.keys()


@pytest.mark.parametrize("kind", ["timesformer", "videomae", "vjepa2"])
def test_a_video_has_frames(tmp_path: Path, kind: str) -> None:
    found = load_pretrained(write_config(tmp_path, kind), batch=2)
    (video,) = (tensor for name, tensor in found.inputs.items() if name.startswith("pixel_values"))
    assert found.task == "image" and video.dim() == 5
    assert found.inputs["labels"].shape == (2,)


@pytest.mark.parametrize(("kind", "name"), [("whisper", "input_features"), ("speecht5", "input_values")])
def test_a_batch_is_tried_in_the_type_of_the_parameters(tmp_path: Path, kind: str, name: str) -> None:
    found = load_pretrained(write_config(tmp_path, kind, dtype="bfloat16"), batch=2, task="audio")
    assert found.inputs[name].dtype == torch.bfloat16


def test_a_model_without_a_forward_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, "bark", architectures=["BarkModel"])
    with pytest.raises(PretrainedError, match="BarkModel has no forward, since its parts run one after another"):
        load_pretrained(config, batch=2, objective="infer")


def test_a_model_with_several_texts_has_a_batch(tmp_path: Path) -> None:
    config = write_config(tmp_path, "musicgen", architectures=None)
    assert load_pretrained(config, batch=2).inputs["input_ids"].shape[0] == 2


def test_architectures_that_are_no_list_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, "llama", architectures="LlamaForCausalLM")
    with pytest.raises(PretrainedError, match=r"architectures is 'LlamaForCausalLM'; expected a list of class names"):
        load_pretrained(config, batch=2)


def test_other_classes_of_a_task_are_named(tmp_path: Path) -> None:
    config = write_config(tmp_path, "wav2vec2", architectures=None)
    (_, note) = load_pretrained(config, batch=2).notes
    assert note.startswith("For the task audio, transformers has Wav2Vec2ForCTC, too")
    (note,) = load_pretrained(config, task="audio", batch=2).notes
    assert "Wav2Vec2ForCTC" in note


def test_an_encoder_that_is_to_predict_the_next_token_is_told(tmp_path: Path) -> None:
    config = write_config(tmp_path, "bert")
    (note,) = load_pretrained(config, task="causal", batch=2).notes
    assert "BertLMHeadModel attends to later tokens" in note and "set is_decoder to true" in note
    assert load_pretrained(write_config(tmp_path, "bert", is_decoder=True), task="causal", batch=2).notes == ()


def test_inputs_that_a_batch_leaves_out_are_told(tmp_path: Path) -> None:
    found = load_pretrained(write_config(tmp_path, "voxtral"), task="audio", batch=2)
    assert "input_features" not in found.inputs
    assert any("The batch has no audio, which the model can read together with text" in note for note in found.notes)


@pytest.mark.parametrize(("kind", "used"), [("vit", False), ("bert", True), ("t5", True)])
def test_a_length_that_no_input_has_is_told(tmp_path: Path, kind: str, used: bool) -> None:
    config = write_config(tmp_path, kind)
    told = [note for note in load_pretrained(config, seq=16, batch=2).notes if "seq=16 is not used" in note]
    assert len(told) == (not used)
    assert all("pixel_values [2, 3, 64, 64]" in note for note in told)
    assert not any("is not used" in note for note in load_pretrained(config, batch=2).notes)


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_commands_say_class_and_task_first(tmp_path: Path, command: str) -> None:
    write_config(tmp_path, "clip", architectures=None)
    result = invoke(command, tmp_path, "--topology", "local:1", "--batch", 2)
    assert result.exit_code == 0, result.output
    model, inputs, *_ = result.stdout.splitlines()
    assert model.startswith("model: CLIPModel, task contrastive (CLIPModel is the class of the type clip")
    assert inputs == "inputs: input_ids 2×64, pixel_values 2×3×64×64, return_loss"
    write_config(tmp_path, "blip", architectures=None)
    refused = invoke(command, tmp_path, "--topology", "local:1", "--batch", 2)
    words = " ".join(refused.output.replace("│", " ").split())
    assert refused.exit_code == 2 and "--task causal or --task contrastive" in words


def test_predict_takes_the_length_of_samples_from_the_other_configuration(tmp_path: Path) -> None:
    config = write_config(tmp_path, "llama")
    layout = "--micro-batch-size 1 --global-batch-size 4 --seq-length 32 --bf16"

    def inputs(*more: Any) -> str:
        result = invoke("predict", config, "--topology", "local:2", "--alone", "--megatron", layout, *more)
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()[1]

    assert inputs() == "inputs: input_ids 4×32, labels 4×32"
    assert inputs("--seq", 16) == "inputs: input_ids 4×16, labels 4×16"


def test_predict_takes_the_number_of_samples_that_follows_from_the_other_configuration(tmp_path: Path) -> None:
    """3 samples of each data-parallel rank at a time, and two such ranks."""
    config, titan = write_config(tmp_path, "llama"), tmp_path / "train.toml"
    titan.write_text("[training]\nlocal_batch_size = 3\nseq_len = 32\n[parallelism]\ntensor_parallel_degree = 2\n")
    result = invoke("predict", config, "--topology", "local:4", "--alone", "--torchtitan", titan)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1] == "inputs: input_ids 6×32, labels 6×32"


def test_inputs_have_the_sizes_of_the_fields(tmp_path: Path) -> None:
    shapes = {}
    for model_type, fields in {
        "vit": {"image_size": 48, "num_channels": 2},
        "audio-spectrogram-transformer": {"num_mel_bins": 40, "max_length": 96},
        "whisper": {"num_mel_bins": 24, "max_source_positions": 32, "max_target_positions": 12},
        "llama": {"max_position_embeddings": 200},
    }.items():
        config = write_config(tmp_path, model_type, **fields)
        shapes[model_type] = {n: tuple(t.shape) for n, t in load_pretrained(config, batch=2).inputs.items()}
    assert shapes == {
        "vit": {"pixel_values": (2, 2, 48, 48), "labels": (2,)},
        "audio-spectrogram-transformer": {"input_values": (2, 96, 40), "labels": (2,)},
        "whisper": {"input_features": (2, 24, 64), "labels": (2, 12)},
        "llama": {"input_ids": (2, 192), "labels": (2, 192)},
    }


def test_the_preprocessor_has_the_size_of_images_if_the_configuration_has_none(tmp_path: Path) -> None:
    config = write_config(tmp_path, "resnet")
    assert load_pretrained(config, batch=2).inputs["pixel_values"].shape == (2, 3, 224, 224)
    (tmp_path / "preprocessor_config.json").write_text('{"crop_size": {"height": 96, "width": 64}}')
    assert load_pretrained(config, batch=2).inputs["pixel_values"].shape == (2, 3, 96, 64)


def test_batches_of_inference_have_no_labels(tmp_path: Path) -> None:
    assert set(load_pretrained(write_config(tmp_path, "llama"), batch=2, objective="infer").inputs) == {"input_ids"}
    inputs = load_pretrained(write_config(tmp_path, "t5"), batch=2, objective="infer").inputs
    assert set(inputs) == {"input_ids", "decoder_input_ids"}


def test_numbers_that_json_does_not_have_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    fields = dict(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16, n_groups=2
    )
    config = transformers.Mamba2Config(**fields)
    assert config.time_step_limit[1] == float("inf")
    config.save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    read = load_pretrained(tmp_path, seq=16, batch=2).model.config
    assert list(read.time_step_limit) == [0.0, float("inf")]


def test_sizes_that_the_type_decides_and_misspelt_fields_are_told(tmp_path: Path) -> None:
    def notes(**fields: Any) -> tuple[str, ...]:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **fields}))
        return load_pretrained(tmp_path, seq=16, batch=2).notes

    sizes = dict(model_type="gpt2", vocab_size=96, n_embd=32, n_layer=2, n_head=2)
    assert notes(**sizes) == ()
    assert notes(**sizes, torch_dtype="bfloat16", _name_or_path="x", my_own_field=3) == ()  # others' fields
    missing, misspelt = notes(model_type="gpt2", vocab_size=96, n_embd=32, n_head=2, n_layers=2)
    assert missing == (
        "The configuration does not give all sizes of the gpt2 model; the defaults of this model type are used: "
        "n_layer=12."
    )
    assert misspelt == (
        "The configuration has a field n_layers, which the model type gpt2 does not have and which is ignored; "
        "did you mean n_layer?"
    )
    tiny_config("clip").save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    del data["text_config"]
    data["vision_config"].pop("hidden_size")
    (tmp_path / "config.json").write_text(json.dumps(data | {"architectures": ["CLIPModel"]}))
    assert read_configuration(tmp_path).notes == (
        "The configuration has no text_config: its sizes are the defaults of this model type.",
        "The configuration does not give all sizes of the clip_vision_model model; the defaults of this "
        "model type are used: hidden_size=768.",
    )


def test_saved_configurations_of_all_types_are_complete(tmp_path: Path) -> None:
    """What transformers saves leaves no size open, and has no misspelt field."""
    checked = 0
    for number, model_type in enumerate(sorted(transformers.CONFIG_MAPPING)):
        if number % 8:
            continue
        try:
            tiny_config(model_type).save_pretrained(tmp_path / model_type)
        except Exception:  # a type without a small configuration
            continue
        checked += 1
        assert read_configuration(tmp_path / model_type).notes == (), model_type
    assert checked > 50


def test_types_are_those_of_the_configuration(tmp_path: Path) -> None:
    plan = partition_pretrained(write_config(tmp_path, "llama", dtype="bfloat16"), Topology.local(2), seq=16, batch=4)
    assert {s.dtype for s in plan.program.states.values() if s.kind == "parameter"} == {"bfloat16"}


def test_a_quantised_configuration_is_planned_without_and_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path, "llama", quantization_config={"quant_method": "fp8"})
    plan = partition_pretrained(config, Topology.local(2), seq=16, batch=4, estimate_only=True)
    assert any("quantisation" in note for note in plan.notes)


# --- weights, verification and runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model's configuration and weights."""
    folder = tmp_path_factory.mktemp("saved")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_plan_remembers_the_folder_of_the_weights(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = partition_pretrained(saved, Topology.local(2), batch=4)
    assert Plan.load(plan.save(file)).weights == str(saved.resolve())
    assert f"plan.json --weights {saved.resolve()}" in invoke("launch", file).stdout
    assert "--weights other" in invoke("launch", file, "--", "--weights", "other").stdout
    assert str(saved) not in invoke("launch", file, "--", "--weights", "other").stdout
    adapted = partition_pretrained(saved, Topology.local(2), batch=4, lora="r=2", estimate_only=True)
    assert adapted.weights == "" and any("no weights of the adapters" in note for note in adapted.notes)


def test_values_are_those_of_the_folder(saved: Path) -> None:
    whole = transformers.LlamaForCausalLM.from_pretrained(saved).state_dict()
    found = load_pretrained(saved, batch=2, values=True).model.state_dict()
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_commands_take_a_folder_in_place_of_a_function(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planned = invoke("plan", saved, "--topology", "local:2", "--tp", 2, "--seq", 16, "--batch", 4, "-o", file)
    assert planned.exit_code == 0, planned.output
    verified = invoke("verify", file, saved)
    assert verified.exit_code == 0 and "Equal:" in verified.stdout, verified.output
    trained = invoke("run", file, saved, "--steps", 2, "--lr", 0.01)
    losses = [float(line.split()[-1]) for line in trained.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 2 and losses[1] < losses[0]
    why = invoke("explain", file, "--why-not", "tp=1,microbatch_size=2", "--model", saved)
    assert why.exit_code == 0, why.output


def test_a_name_that_is_a_function_is_refused_the_options_of_configurations(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2)\n")
    result = invoke("plan", f"{tmp_path / 'model.py'}:make", "--topology", "local:2", "--seq", 16)
    assert result.exit_code == 2
    assert "--seq applies only to a configuration" in result.stderr


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_adapters_alone_are_trained(saved: Path) -> None:
    found = load_pretrained(saved, seq=16, batch=4, lora="r=4,alpha=8,targets=q_proj+v_proj", values=True)
    trained = {name for name, p in found.model.named_parameters() if p.requires_grad}
    assert len(trained) == 8 and all(".lora_A." in name or ".lora_B." in name for name in trained)
    plain = load_pretrained(saved, seq=16, batch=4, values=True)
    with torch.no_grad():
        assert torch.equal(found.model(**found.inputs).loss, plain.model(**plain.inputs).loss)  # B starts as zero


def test_an_adapted_layer_computes_the_sum() -> None:
    for base, transposed in (
        (torch.nn.Linear(6, 4), False),
        (transformers.pytorch_utils.Conv1D(4, 6), True),
    ):
        layer = AdaptedLinear(base, Lora(r=2, alpha=6), transposed=transposed)
        torch.nn.init.normal_(layer.lora_B.weight)
        x = torch.randn(3, 5, 6)
        expected = base(x) + 3 * x @ layer.lora_A.weight.T @ layer.lora_B.weight.T
        torch.testing.assert_close(layer(x), expected)


class WrittenOut(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias


class Doubled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Router(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).topk(2).values


def test_a_subclass_gets_an_adapter_if_it_computes_a_linear_layer() -> None:
    layers = {"same": WrittenOut(6, 4), "bare": WrittenOut(6, 4, bias=False), "doubled": Doubled(6, 4)}
    layers |= {"router": Router(6, 4), "inner": torch.nn.MultiheadAttention(4, 2)}
    model = torch.nn.ModuleDict(layers)
    x = torch.randn(2, 6)
    before = {name: layers[name](x) for name in ("same", "bare")}
    assert add_adapters(model, Lora(r=2)) == 2
    for name, result in before.items():
        assert isinstance(model[name], AdaptedLinear)
        torch.testing.assert_close(model[name](x), result)


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("llama", "r=4,dropout=0.25,modules_to_save=norm"),
        ("gpt2", "r=4"),
        ("falcon", "r=4,targets=query_key_value"),
        ("vit", "r=64,modules_to_save=classifier"),
    ],
)
def test_adapted_models_run_on_ranks_as_on_one(tmp_path: Path, model_type: str, lora: str) -> None:
    """GPT-2's linear layers have transposed weights, and Falcon's are of a subclass. Gradients are equal in float64."""
    seq = None if model_type == "vit" else 16
    found = load_pretrained(write_config(tmp_path, model_type), seq=seq, batch=4, lora=lora, values=True)
    for name, parameter in found.model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    plan = partition(found.model, Topology.local(2), found.inputs, constraints=Constraints(tp=2))
    run = run_local(plan, found.model, found.inputs, precision="fp64", timeout=240)
    assert set(run.grads) == {name for name, p in found.model.named_parameters() if p.requires_grad}
    errors = compare(run, run_reference(found.model, found.inputs, None), plan.program)
    assert {n: e for n, e in errors.items() if not e <= TOLERANCE} == {}


def test_modules_to_save_are_trained_as_a_whole(tmp_path: Path) -> None:
    config = write_config(tmp_path, "vit")
    found = load_pretrained(config, batch=4, lora="r=2,modules_to_save=classifier")
    trained = {name for name, p in found.model.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"classifier.weight", "classifier.bias"}
    assert not any(name.startswith("classifier.lora") for name in trained)
    with pytest.raises(PretrainedError, match=r"shares a weight with transformer.wte"):
        load_pretrained(write_config(tmp_path / "tied", "gpt2"), seq=16, batch=4, lora="r=2,modules_to_save=lm_head")


def test_layers_whose_weight_is_read_elsewhere_get_no_adapter(tmp_path: Path) -> None:
    """Mamba multiplies by the weight of ``dt_proj`` and does not call the layer."""
    config = write_config(tmp_path, "mamba")
    found = load_pretrained(config, seq=16, batch=4, lora="r=2")
    names = {name for name, _ in found.model.named_parameters()}
    assert any("x_proj.lora_A" in name for name in names) and not any("dt_proj.lora_A" in name for name in names)
    assert any(note.startswith("dt_proj get no adapters") for note in found.notes)
    with pytest.raises(PretrainedError, match=r"of dt_proj would have no effect.*leave dt_proj out of targets"):
        load_pretrained(config, seq=16, batch=4, lora="r=2,targets=dt_proj+x_proj")


@pytest.mark.parametrize("from_folder", [False, True])
def test_adapters_are_saved_as_peft_reads_them(tmp_path: Path, from_folder: bool) -> None:
    lora = "r=2,alpha=6,dropout=0.1,modules_to_save=classifier"
    found = load_pretrained(write_config(tmp_path / "model", "vit"), batch=4, lora=lora, values=True)
    weights: Any = found.model.state_dict()
    if from_folder:
        Engine(partition(found.model, Topology.local(1), found.inputs), found.model).export_weights(tmp_path / "all")
        weights = tmp_path / "all"
    folder = save_adapters(tmp_path / "adapter", weights, lora, base="base/model")
    saved = load_file(folder / "adapter_model.safetensors")
    trained = {name: p for name, p in found.model.named_parameters() if p.requires_grad}
    assert {*saved} == {f"base_model.model.{name}" for name in trained}
    for name, parameter in trained.items():
        assert torch.equal(saved[f"base_model.model.{name}"], parameter)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["lora_dropout"]) == ("LORA", 2, 6, 0.1)
    assert config["base_model_name_or_path"] == "base/model" and config["modules_to_save"] == ["classifier"]
    every = {name.rpartition(".")[2] for name, m in found.model.named_modules() if isinstance(m, AdaptedLinear)}
    assert {*config["target_modules"]} == every


def test_targets_are_whole_paths_if_other_layers_have_the_same_last_part(tmp_path: Path) -> None:
    names = ["a.proj.weight", "a.proj.lora_A.weight", "a.proj.lora_B.weight", "b.proj.weight"]
    folder = save_adapters(tmp_path, {name: torch.ones(2, 2) for name in names}, "r=2", task="causal")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["a.proj"] and config["task_type"] == "CAUSAL_LM"


def test_weights_without_these_adapters_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(PretrainedError, match="the weights have no adapters"):
        save_adapters(tmp_path, {"a.weight": torch.ones(2, 2)}, "r=2")
    with pytest.raises(PretrainedError, match="have the rank 2, and lora says r=4"):
        save_adapters(tmp_path, {"a.lora_A.weight": torch.ones(2, 3), "a.lora_B.weight": torch.ones(3, 2)}, "r=4")


def test_adapters_take_less_memory_than_all_weights(saved: Path) -> None:
    where = Topology.local(1)
    whole = partition_pretrained(saved, where, batch=4, estimate_only=True)
    small = partition_pretrained(saved, where, batch=4, lora={"r": 2}, estimate_only=True)
    assert max(small.estimate.memory) < max(whole.estimate.memory)


@pytest.mark.parametrize(
    "lora",
    "r=0;r=two;alpha=3;r=4,alpha=-1;r=4,alpha=much;r=4,dropout=1;r=4,dropout=some;r=4,lora_alpha=8;r;"
    "r=4,targets=nowhere;r=4,modules_to_save=nowhere;".split(";"),
)
def test_wrong_adapters_are_refused(saved: Path, lora: str) -> None:
    with pytest.raises(PretrainedError, match="lora"):
        load_pretrained(saved, batch=2, lora=lora)


def test_adapters_that_are_no_options_are_refused(saved: Path) -> None:
    with pytest.raises(PretrainedError, match="lora: got 3; expected r=RANK"):
        load_pretrained(saved, batch=2, lora=3)  # type: ignore[arg-type]


def test_an_unknown_option_of_adapters_is_named(saved: Path) -> None:
    with pytest.raises(PretrainedError, match="unknown option 'lora_alpha'; write alpha; expected r=RANK"):
        load_pretrained(saved, batch=2, lora="r=4,lora_alpha=8")
    with pytest.raises(PretrainedError, match="unknown option 'droput'; did you mean dropout"):
        load_pretrained(saved, batch=2, lora={"r": 4, "droput": 0.5})


# --- commands on a plan -----------------------------------------------------------------------------------------------


def test_verify_takes_the_number_of_frames_from_the_plan(tmp_path: Path) -> None:
    """Whisper's inputs have frames and tokens; the length of a sample is in frames."""
    config, plan = write_config(tmp_path, "whisper"), tmp_path / "plan.json"
    frames = 2 * json.loads((config / "config.json").read_text())["max_source_positions"]
    made = invoke("plan", config, "--topology", "local:2", "--seq", frames, "--batch", 4, "-o", plan)
    assert made.exit_code == 0, made.output
    result = invoke("verify", plan, config)
    assert result.exit_code == 0, result.output
    assert f"×{frames}" in result.stdout and "Equal" in result.stdout


def test_the_longest_sequence_is_at_most_the_number_of_positions(tmp_path: Path) -> None:
    config = write_config(tmp_path, "gpt2")
    positions = load_pretrained(config, seq=16, batch=2).longest
    assert positions is not None and positions > 16
    result = invoke("largest", config, "--topology", "local:1", "--seq", 16, "--batch", 2)
    assert result.exit_code == 0, result.output
    assert f"a sequence of {positions} tokens fits" in result.stdout


# --- errors -----------------------------------------------------------------------------------------------------------


def test_layers_that_are_skipped_at_random_are_refused_in_training(tmp_path: Path) -> None:
    config = write_config(tmp_path, "wav2vec2", layerdrop=0.1)
    with pytest.raises(PretrainedError, match=r"layerdrop=0.1 skips whole layers .*; expected layerdrop=0"):
        load_pretrained(config, batch=2)
    assert load_pretrained(config, batch=2, objective="infer").task == "audio"


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    def refused(pattern: str, source: Path, kind: type[PretrainedError] = PretrainedError) -> None:
        with pytest.raises(kind, match=pattern):
            load_pretrained(source)
        result = invoke("plan", source, "--topology", "local:2")
        assert result.exit_code == 2, result.output

    file = tmp_path / "config.json"
    refused("has no config.json", tmp_path)
    refused("there is no file", file)
    for text, pattern in {
        "{": "is not JSON",
        "[1]": "has a list; expected a JSON object",
        "{}": "has no model_type",
        '{"model_type": "lama"}': "no model_type 'lama'; did you mean llama",
        '{"model_type": "llama", "num_hidden_layers": 100000000}': "num_hidden_layers is 100000000; expected at most",
        '{"model_type": "llama", "hidden_size": "wide"}': "does not accept",
        '{"model_type": "llama", "hidden_act": "none"}': "cannot build LlamaForCausalLM",
        '{"model_type": "sam"}': "no sam model for a task that is known",
    }.items():
        file.write_text(text)
        refused(pattern, tmp_path)
    file.write_bytes(b"\xff\xfe\x00")
    refused("is not JSON", file)
    for field in ({"auto_map": {"AutoModel": "code.Model"}}, {"text_config": {"trust_remote_code": True}}):
        file.write_text(json.dumps({"model_type": "llama"} | field))
        refused("needs Python code that comes with the model", tmp_path, RemoteCodeError)


def test_code_in_the_folder_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    fields = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert invoke("plan", tmp_path, "--topology", "local:2").exit_code == 2
    assert not (tmp_path / "ran").exists()


def test_a_name_on_the_hub_needs_the_hub() -> None:
    with pytest.raises(HubError, match="there is no folder nobody/nothing, and its configuration cannot be read"):
        load_pretrained("nobody/nothing")


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"task": "speech"}, "no task 'speech'; expected one of causal, seq2seq"),
        ({"task": "image"}, re.escape("no llama model for the task image (it has: causal, text)")),
        ({"seq": 33}, "longer than the 32 positions"),
        ({"seq": 0}, "seq must be a whole number"),
        ({"batch": 1.5}, "batch must be a whole number"),
    ],
)
def test_wrong_options_say_what_was_expected(saved: Path, options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(PretrainedError, match=pattern):
        load_pretrained(saved, **options)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.sampled_from([2**31, 10**12, -(10**9)]), st.floats(),
    st.text(max_size=6), st.lists(st.integers(-1, 9), max_size=3), st.dictionaries(st.text(max_size=3), st.none()),
)  # fmt: skip
SMALL = {"llama": tiny_config("llama"), "t5": tiny_config("t5"), "vit": tiny_config("vit"), "bert": tiny_config("bert")}


@settings(max_examples=examples(120), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_files_give_typed_errors_alone(tmp_path: Path, data: st.DataObject) -> None:
    fields = json.loads(SMALL[data.draw(st.sampled_from(sorted(SMALL)))].to_json_string(use_diff=False))
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[name] = data.draw(VALUES)
    text = json.dumps(fields)
    if data.draw(st.integers(0, 9)) == 0:
        text = text[: data.draw(st.integers(0, len(text)))]
    (tmp_path / "config.json").write_text(text)
    with contextlib.suppress(PretrainedError):
        assert load_pretrained(tmp_path, batch=2).inputs


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(SMALL["llama"].to_dict())), value=VALUES)
def test_changed_files_are_planned_or_refused(tmp_path: Path, name: str, value: Any) -> None:
    fields = json.loads(SMALL["llama"].to_json_string(use_diff=False)) | {name: value}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with contextlib.suppress(PretrainedError, InputsError, CaptureError, UnsupportedError, CapacityError):
        plan = partition_pretrained(tmp_path, Topology.local(2), seq=8, batch=2, estimate_only=True)
        assert plan.estimate.step_time > 0


# --- whether a job fits -----------------------------------------------------------------------------------------------


def small_node(devices: int, mebibytes: int) -> Topology:
    """Return this machine with little memory for each rank."""
    node = Topology.local(devices)
    types = {name: kind.model_copy(update={"memory": mebibytes * 2**20}) for name, kind in node.types.items()}
    return node.model_copy(update={"types": types})


def test_fit_answers_what_a_run_takes_and_what_the_largest_sizes_are(saved: Path, tmp_path: Path) -> None:
    node = tmp_path / "node.yaml"
    node.write_text(small_node(2, 1).to_yaml())
    sizes = "--seq", 16, "--batch", 4, "--constraints", "dp=2,tp=1,pp=1"
    result = invoke("fit", saved, "--topology", node, *sizes, "--tokens", "64k", "--price", 36)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for words in ("fits: yes", "left on the fullest rank", "tokens/s", "largest batch: a microbatch", "1,000 steps"):
        assert words in text
    assert "longest sequence: a sequence of 32 tokens fits" in text  # as many positions as the model has


def test_fit_says_what_fits_where_the_job_does_not(tmp_path: Path) -> None:
    config = write_config(tmp_path, "llama", max_position_embeddings=2**14)
    found = load_pretrained(config, seq=2**14, batch=1)
    fit = check_fit(found.model, small_node(1, 16), found.inputs, longest=found.longest, tokens=1e9)
    assert fit.plan is None and fit.run is None and fit.margin_bytes is None
    assert fit.microbatch is None
    assert "too much" in fit.reason
    assert fit.sequence is not None and 128 <= fit.sequence.size < 2**14
    assert str(fit).startswith("fits: no; ")


def test_the_margin_and_the_rate_are_those_of_the_plan(saved: Path) -> None:
    found = load_pretrained(saved, seq=16, batch=4)
    fit = check_fit(found.model, small_node(1, 1), found.inputs, longest=16, tokens=6400)
    assert fit.plan is not None and fit.run is not None and fit.microbatch is not None
    planned = partition(found.model, small_node(1, 1), found.inputs)
    assert fit.plan.estimate.memory == planned.estimate.memory  # one figure, here and in the summary of the plan
    assert fit.margin_bytes is not None and 0 < fit.margin_bytes < 2**20
    assert f"layout: {candidate_text(planned.chosen)}\n" in str(fit)
    assert f"for a step of {format_plural(fit.microbatch.plan.global_batch, 'sample')}" in str(fit)
    assert fit.tokens_per_s == pytest.approx(64 / fit.plan.estimate.step_time)
    assert fit.run.steps == 100
    assert fit.microbatch.too_large is not None
    assert fit.microbatch.size < fit.microbatch.too_large <= fit.microbatch.size * (1 + 1 / 16) + 1


# --- images with text -------------------------------------------------------------------------------------------------

_TEXT = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
_VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32)
_VISION |= dict(patch_size=8)  # 16 patches
IMAGE_TEXTS: dict[str, dict[str, Any]] = {
    "clip": dict(text_config={**_TEXT, "max_position_embeddings": 64}, vision_config=_VISION, projection_dim=16),
    "siglip": dict(
        text_config={**_TEXT, "max_position_embeddings": 64, "projection_size": 32, "pad_token_id": 1},
        vision_config=_VISION,
    ),
    "llava": dict(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={"model_type": "clip_vision_model", **_VISION},
        image_token_index=127,
        image_token_id=127,
    ),
    "paligemma": dict(
        text_config={"model_type": "gemma", "head_dim": 8, "num_key_value_heads": 2, **_TEXT},
        vision_config={"model_type": "siglip_vision_model", "projection_dim": 32, **_VISION},
        image_token_index=127,
        image_token_id=127,
        projection_dim=32,
        hidden_size=32,
    ),
    "blip": dict(
        text_config={**_TEXT, "encoder_hidden_size": 32, "projection_dim": 16, "max_position_embeddings": 64},
        vision_config=_VISION,
        architectures=["BlipForConditionalGeneration"],
    ),
    "qwen2_vl": dict(
        text_config={
            **_TEXT,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        vision_config=dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, patch_size=8, spatial_merge_size=2),
    ),
}


IMAGE_TEXT_CLASSES = {
    "clip": "CLIPModel",
    "siglip": "SiglipModel",
    "llava": "LlavaForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "blip": "BlipForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
}


def write_image_text(folder: Path, model_type: str, **changes: Any) -> Path:
    fields = IMAGE_TEXTS[model_type] | {"architectures": [IMAGE_TEXT_CLASSES[model_type]]}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **fields, **changes}))
    return folder


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "zero": 2}], ids=["tp2", "dp2 zero2"])
@pytest.mark.parametrize("model_type", ["clip", "siglip", "llava", "paligemma", "blip"])
def test_images_with_text_are_planned_from_a_configuration(
    tmp_path: Path, model_type: str, sizes: dict[str, Any]
) -> None:
    """With the numbers of the unmodified model: the loss, and every gradient, in float64."""
    config = write_image_text(tmp_path, model_type)
    found = load_pretrained(config, seq=32, batch=4, values=True)
    assert found.task == ("contrastive" if model_type in ("clip", "siglip") else "causal")
    assert found.notes == () and found.inputs["pixel_values"].shape == (4, 3, 32, 32)
    if model_type in ("llava", "paligemma"):  # each of the 16 patches is a feature
        assert (found.inputs["input_ids"] == 127).sum(1).tolist() == [16] * 4
    model = found.model.double().eval()
    inputs = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in found.inputs.items()}
    plan = partition(model, Topology.local(2), inputs, constraints=Constraints(**sizes))
    assert plan.verify(model, inputs).ok
    meta = partition_pretrained(config, Topology.local(2), seq=32, batch=4, constraints=Constraints(**sizes))
    assert {i.path for i in meta.program.inputs} == {n for n, x in found.inputs.items() if torch.is_tensor(x)}


def test_text_with_images_of_no_fixed_shape_is_planned_alone(tmp_path: Path) -> None:
    found = load_pretrained(write_image_text(tmp_path, "qwen2_vl"), seq=32, batch=4)
    assert {*found.inputs} == {"input_ids", "labels"}
    assert any("The batch has no images" in note for note in found.notes)


def test_a_text_needs_room_for_the_features_of_an_image(tmp_path: Path) -> None:
    with pytest.raises(PretrainedError, match=r"too short for the 16 placeholders of an image; give a --seq above 16"):
        load_pretrained(write_image_text(tmp_path, "llava"), seq=16, batch=4)


def test_a_ctc_loss_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = write_config(tmp_path, "wav2vec2", architectures=["Wav2Vec2ForCTC"])
    with pytest.raises(PretrainedError, match=r"Wav2Vec2ForCTC has a CTC loss.*--objective infer"):
        load_pretrained(config, batch=4)
    plan = partition_pretrained(config, Topology.local(2), batch=4, objective="infer")
    assert [output.path for output in plan.program.outputs] == ["logits"]
