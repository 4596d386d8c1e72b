"""Which settings of an engine keep its blocks apart from others', and which must not: without a server and without an engine."""

import os
import unittest
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import doubles

doubles.install()

import torch  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

from kvarts import link, vllm, vllm_identity  # noqa: E402
from kvarts.link import brief, contract, differing, told  # noqa: E402
from kvarts.vllm_identity import identity_of, layout_version  # noqa: E402


def configuration(**parts):
    """As vLLM's, with these parts changed."""
    model = dict(model="test/model", revision="1", dtype="bfloat16", quantization=None, hf_overrides={}, max_model_len=4096)
    made = dict(model=model, load=dict(load_format="auto"), cache=dict(cache_dtype="auto"), attention=dict(backend=None))
    for part, changes in parts.items():
        made[part] = {**made[part], **changes}
    config = SimpleNamespace(**{part + "_config": SimpleNamespace(**values) for part, values in made.items()})
    config.speculative_config = None
    return config


def rope(**more):
    factors = {"rope_type": "longrope", "original_max_position_embeddings": 4096, **more}
    return SimpleNamespace(rope_parameters=factors)


class Vllm(unittest.TestCase):
    def test_each_setting_that_decides_bytes_keeps_engines_apart(self):
        plain = identity_of(configuration())
        differ = {
            "model": [
                {"revision": "2"},
                {"dtype": "float16"},
                {"quantization": "fp8"},
                {"quantization_config": {"bits": 4}},
                {"hf_overrides": {"rope_parameters": {"factor": 4}}},
                {"model_weights": "s3://other"},
                {"config_format": "mistral"},
                {"model_class_overrides": {"A": "other:A"}},
                {"model_impl": "transformers"},
                {"disable_sliding_window": True},
                {"code_revision": "2"},
            ],
            "load": [{"load_format": "dummy"}],
            "cache": [
                {"kv_cache_dtype_skip_layers": ["0"]},
                {"mamba_cache_dtype": "float32"},
                {"mamba_ssm_cache_dtype": "float32"},
                {"mamba_cache_mode": "all"},
                {"use_replayssm": True},
            ],
            "attention": [
                {"backend": "FLASHINFER"},
                {"backend_per_kind": {"mla": "X"}},
                {"flash_attn_version": 2},
                {"use_trtllm_attention": True},
                {"indexer_kv_dtype": "fp8"},
            ],
        }
        found = [plain]
        for part, changes in differ.items():
            for change in changes:
                with self.subTest(change):
                    other = identity_of(configuration(**{part: change}))
                    self.assertNotIn(other, found)
                    found.append(other)

    def test_what_is_not_set_is_what_an_older_version_cannot_set(self):
        unset = dict(model_weights="", code_revision=None, model_class_overrides={}, disable_sliding_window=False)
        new = configuration(model=unset, cache={"kv_cache_dtype_skip_layers": []}, attention={"backend_per_kind": {}})
        del new.attention_config
        self.assertEqual(identity_of(new), identity_of(configuration()))

    def test_long_rope_is_a_yes_or_a_no_and_not_a_length(self):
        def of(length, config):
            return identity_of(configuration(model={"max_model_len": length, "hf_config": config}))["long-rope"]

        self.assertEqual([of(length, rope()) for length in (1024, 4096, 4097, 131072)], ["no", "no", "yes", "yes"])
        self.assertEqual(of(131072, SimpleNamespace(rope_parameters={"rope_type": "yarn"})), "none")
        older = SimpleNamespace(rope_scaling={"type": "su"}, original_max_position_embeddings=4096)
        self.assertEqual([of(length, older) for length in (4096, 8192)], ["no", "yes"])
        by_kind = SimpleNamespace(rope_parameters={"full": rope().rope_parameters, "sliding": {"rope_type": "default"}})
        self.assertEqual(of(8192, by_kind), "yes")
        with self.assertRaisesRegex(ValueError, "original_max_position_embeddings"):
            of(4096, SimpleNamespace(rope_parameters={"rope_type": "longrope"}))

    def test_variables_that_decide_an_arrangement_keep_engines_apart(self):
        plain = identity_of(configuration())
        with mock.patch.dict(os.environ, {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}):
            self.assertNotEqual(identity_of(configuration()), plain)
        generation = SimpleNamespace(device_type="cuda", get_device_capability=lambda: (9, 0))
        with mock.patch.object(vllm_identity, "current_platform", generation):
            hopper = identity_of(configuration())
        generation.get_device_capability = lambda: (8, 0)
        with mock.patch.object(vllm_identity, "current_platform", generation):
            self.assertNotEqual(identity_of(configuration()), hopper)

    def test_what_has_another_name_in_every_process_is_refused(self):
        for change in ({"hf_overrides": lambda config: config}, {"quantization_config": {"how": print}}):
            with self.subTest(change), self.assertRaisesRegex(ValueError, "hf_overrides|quantization_config"):
                identity_of(configuration(model=change))
        with self.assertRaisesRegex(ValueError, "calculate_kv_scales"):
            identity_of(configuration(cache={"calculate_kv_scales": True}))

    def test_another_configuration_than_the_models_own_counts_with_its_content(self):
        with self.assertRaisesRegex(ValueError, "revision.*other/config"):
            identity_of(configuration(model={"hf_config_path": "other/config"}))
        here = os.path.dirname(os.path.abspath(__file__))
        self.assertNotEqual(identity_of(configuration(model={"hf_config_path": here}))["config"], "none")

    def test_the_caches_of_all_groups_count(self):
        def caches(width, names=("0",)):
            spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=width, dtype=torch.bfloat16)
            groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=list(names))]
            return identity_of(configuration(), kv_cache_config=SimpleNamespace(kv_cache_groups=groups))["caches"]

        self.assertEqual(caches(32), caches(32))
        self.assertEqual(len({caches(32), caches(64), caches(32, ("1",))}), 3)

    def test_a_tier_is_named_in_full_or_not_made(self):
        config = configuration()
        config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={"server": "s", "identity": {"mine": "1"}})
        vllm._complete(config)
        [tier] = config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
        self.assertTrue(tier["incomplete"])
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["0"])])
        for _ in range(2):
            vllm._complete(config, groups)
            vllm._complete(config)
            [tier] = config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
            self.assertNotIn("incomplete", tier)
            self.assertEqual((tier["identity"]["mine"], tier["server"], "caches" in tier["identity"]), ("1", "s", True))


@dataclass
class Described:
    size: int
    padded: int | None = None


@dataclass
class Later(Described):
    more: int = 0


class Names(unittest.TestCase):
    def test_builds_of_one_release_are_that_release_and_others_are_not(self):
        same = ["0.33.0", "0.33.0+cu130", "0.33.0.post1", "0.33.0.post2+cpu"]
        self.assertEqual(len({contract("vllm", version, {}) for version in same}), 1)
        apart = ["0.33.0", "0.33.1", "0.34.0", "0.33.1.dev3+gabc", "0.33.1.dev3+gabd", "0.33.0rc1"]
        self.assertEqual(len({contract("vllm", version, {}) for version in apart}), len(apart))

    def test_versions_that_are_known_to_be_equal_share_and_rules_keep_apart(self):
        alike = {"0.33.1": "0.33.0"}
        self.assertEqual(contract("vllm", "0.33.1+cpu", alike, "x"), contract("vllm", "0.33.0", alike, "x"))
        self.assertNotEqual(contract("vllm", "0.33.1", {}, "x"), contract("vllm", "0.33.0", {}, "x"))
        self.assertNotEqual(contract("vllm", "0.33.0", {}, "x"), contract("vllm", "0.33.0", {}, "y"))
        self.assertNotEqual(contract("vllm", "0.33.0", {}), contract("sglang", "0.33.0", {}))
        with mock.patch.object(vllm_identity, "vllm_version", "0.33.0+cu130"):
            first = layout_version("LBNHC")
        with mock.patch.object(vllm_identity, "vllm_version", "0.33.0+cu129"):
            self.assertEqual(layout_version("LBNHC"), first)
            self.assertNotEqual(layout_version("BLNHC"), first)

    def test_a_field_that_a_later_version_adds_changes_nothing_until_it_is_used(self):
        self.assertEqual(differing(Later(1)).replace("Later", "Described"), differing(Described(1)))
        self.assertNotEqual(differing(Later(1, more=2)), differing(Later(1)))
        self.assertNotEqual(differing(Described(1, padded=2)), differing(Described(1)))

    def test_settings_are_text_that_every_process_has(self):
        self.assertEqual(told({"b": 1, "a": [None, True]}), told({"a": [None, True], "b": 1}))
        self.assertEqual(told({2, 1}), told({1, 2}))
        for wrong in (lambda: 0, object(), {"a": object()}, len):
            with self.subTest(wrong), self.assertRaises(ValueError):
                told(wrong)

    def test_settings_that_an_identity_cannot_take_stand_there_as_digests(self):
        odd = {"long": "x" * 5000, "other": "x" * 5001, "line": "a\nb", "spaces": " a", "empty": ""}
        found = brief({**odd, "plain": 3})
        self.assertEqual(found.pop("plain"), "3")
        self.assertEqual(len(set(found.values())), len(odd))
        self.assertTrue(all(value.startswith("digest-") and len(value) < 100 for value in found.values()))


class Silent(unittest.TestCase):
    def test_silence_is_what_ends_a_request_and_not_its_size(self):
        clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        with mock.patch.object(link, "time", clock):
            silence = link.Silence(1.0)
            for part in range(100):
                silence.began(part, link.PART)
            late = link.kvarts.Deadline("", "DeadlinePassed")
            for part in range(90):
                clock.now += 1.0
                self.assertEqual(silence.broken(), [])
                silence.heard(part, True, {})
            # An answer that this process gave itself is no sign of the server.
            clock.now += 0.8
            silence.heard(90, False, {"DeadlinePassed": (late, 1)})
            clock.now += 0.8
            self.assertEqual(silence.broken(), list(range(91, 100)))
            self.assertEqual((silence.broken(), silence.nbytes), ([], 0))


if __name__ == "__main__":
    unittest.main()
