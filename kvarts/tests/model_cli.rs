//! Runs the real `kvarts` program: what `kvarts model` prints, and how it refuses.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

const SHIPPED: &[&str] = &[
    "llama-3.1-8b",
    "llama-3.1-70b",
    "mistral-small-24b",
    "qwen3-32b",
    "qwen3-coder-30b-a3b",
    "glm-4.5",
    "minimax-m2",
    "kimi-k2",
    "kimi-k2-fp8",
    "deepseek-v3",
    "deepseek-v3.2",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-3-27b",
    "qwen3-next-80b",
    "qwen3-next-80b-bf16state",
    "qwen3.5-397b",
    "qwen3.5-397b-bf16state",
    "deepseek-v4-pro",
    "deepseek-v4-pro-fp4idx",
    "deepseek-v4-flash",
    "deepseek-v4-flash-fp4idx",
];

const SPEC: &str = r#"name = "tiny"
source = "made up"
block_tokens = 16
layers = [{ repeat = 4, of = ["full"] }]

[layer]
full = ["kv"]

[part.kv]
kind = "dense_kv"
role = "stream"
bytes = 2048
dtype = "bf16"
heads = 8
"#;

const CONFIG: &str = r#"{
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128,
  "num_hidden_layers": 48, "num_key_value_heads": 4, "torch_dtype": "bfloat16", "use_sliding_window": false
}"#;

fn start(arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_kvarts"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn kvarts(arguments: &[&str]) -> Output {
    start(arguments).wait_with_output().unwrap()
}

fn kvarts_with_input(arguments: &[&str], input: &[u8]) -> Output {
    let mut child = start(arguments);
    // A program that refuses early closes its end first.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

fn succeeds(output: Output) -> String {
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{errors}");
    assert_eq!(errors, "");
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeds(kvarts(arguments))).unwrap()
}

/// The one line on standard error of a refusal.
fn refusal(output: Output) -> String {
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert_eq!(output.stdout, b"", "nothing on standard output");
    let line = errors.strip_suffix('\n').unwrap();
    assert!(!line.contains('\n') && line.len() < 700, "one line: {errors}");
    line.strip_prefix("kvarts: ").unwrap().to_owned()
}

/// A file of this test run's own.
fn file(name: &str, text: impl AsRef<[u8]>) -> String {
    let path: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("model_cli-{name}"));
    std::fs::write(&path, text).unwrap();
    path.into_os_string().into_string().unwrap()
}

#[test]
fn the_list_names_every_shipped_model() {
    let table = succeeds(kvarts(&["model", "list"]));
    let names: Vec<&str> = table.lines().skip(1).map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(names, SHIPPED);
    let rows = json(&["model", "list", "--json"]);
    let names: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, SHIPPED);
}

#[test]
fn every_shipped_model_is_shown_with_parts_that_add_up() {
    for name in SHIPPED {
        let shown = json(&["model", "show", name, "--tokens", "1048576", "--tp", "2", "--json"]);
        let parts = shown["parts"].as_array().unwrap();
        let sum = |field: &str| parts.iter().map(|part| part[field].as_f64().unwrap_or(0.0)).sum::<f64>();
        let stream = shown["stream_bytes_per_token"].as_f64().unwrap();
        assert_eq!(sum("bytes_per_token"), stream, "{name}");
        assert_eq!(sum("boundary_bytes"), shown["boundary_bytes"].as_f64().unwrap(), "{name}");
        assert_eq!(sum("held_bytes"), shown["held_bytes"].as_f64().unwrap(), "{name}");
        assert_eq!(shown["bytes_for_tokens"].as_f64().unwrap(), stream * 1048576.0, "{name}");
        assert_eq!(shown["name"], *name);
        assert_eq!(shown["block_tokens"], 256);
        assert_eq!(shown["fingerprint"].as_str().unwrap().len(), 64);
        assert!(shown["layers"].as_u64().unwrap() > 0);
        let table = succeeds(kvarts(&["model", "show", name]));
        assert!(table.starts_with(&format!("{name}\n")), "{table}");
        for part in parts {
            assert!(table.contains(part["name"].as_str().unwrap()), "{table}");
        }
    }
}

#[test]
fn the_numbers_of_three_models_are_the_published_ones() {
    let pro = json(&["model", "show", "deepseek-v4-pro", "--json"]);
    assert_eq!(pro["stream_bytes_per_token"], 5511.4375);
    assert_eq!(pro["boundary_bytes"], 4_559_872 + 30 * (65_536 + 16_384));
    assert_eq!(pro["held_bytes"], 4_559_872 + 30 * (65_536 + 16_384) + 31 * 524_288);
    let gemma = json(&["model", "show", "gemma-3-27b", "--tokens", "1000", "--json"]);
    assert_eq!(gemma["boundary_bytes"], 436_207_616);
    assert_eq!(gemma["blocks"], 3);
    assert_eq!(gemma["bytes_for_tokens"], 768 * 81_920);
    assert_eq!(gemma["restore_bytes_for_tokens"], 768 * 81_920 + 436_207_616);
    let llama = json(&["model", "show", "llama-3.1-70b", "--block-tokens", "16", "--tp", "8", "--json"]);
    assert_eq!(llama["block_tokens"], 16);
    assert_eq!(llama["tp"]["stream_bytes_per_token"], 327_680 / 8);
    let coordinates = llama["tp"]["groups"][0]["coordinates"].as_array().unwrap();
    assert_eq!(coordinates.len(), 8);
    assert_eq!(coordinates[3]["text"], "heads 3+1/8");
}

#[test]
fn too_few_heads_are_shared_by_ranks_and_latents_are_replicated() {
    let next = json(&["model", "show", "qwen3-next-80b", "--tp", "8", "--json"]);
    let groups = next["tp"]["groups"].as_array().unwrap();
    assert_eq!(groups[0]["coordinates"].as_array().unwrap().len(), 2);
    assert_eq!(groups[0]["ranks_per_coordinate"], 4);
    assert_eq!(next["tp"]["stream_bytes_per_token"], 24_576 / 2);
    let mla = json(&["model", "show", "deepseek-v3.2", "--tp", "8", "--json"]);
    assert_eq!(mla["tp"]["groups"][0]["coordinates"][0]["text"], "replicated");
    assert_eq!(mla["tp"]["stream_bytes_per_token"], 48_068);
}

#[test]
fn an_imported_configuration_is_a_spec_that_checks_out() {
    let config = file("config.json", CONFIG);
    let toml = succeeds(kvarts(&["model", "import", &config]));
    let spec = file("imported.toml", &toml);
    let ok = succeeds(kvarts(&["model", "check", &spec]));
    assert!(ok.contains(": ok: qwen3_moe, 48 layers, 98,304 B a token"), "{ok}");
    let shipped = json(&["model", "show", "qwen3-coder-30b-a3b", "--json"]);
    assert_eq!(json(&["model", "show", &spec, "--json"])["fingerprint"], shipped["fingerprint"]);
    assert_eq!(json(&["model", "check", &spec, "--json"])["fingerprint"], shipped["fingerprint"]);
    // From a pipe, into a file, with other choices.
    let out = file("out.toml", "");
    let arguments = ["model", "import", "-", "--out", &out, "--name", "mine", "--kv-dtype", "fp8"];
    let refused = refusal(kvarts_with_input(&arguments, CONFIG.as_bytes()));
    assert!(refused.contains("exists already") && std::fs::read(&out).unwrap().is_empty(), "{refused}");
    let arguments = [&arguments[..], &["--force"]].concat();
    assert_eq!(succeeds(kvarts_with_input(&arguments, CONFIG.as_bytes())), "");
    let mine = json(&["model", "show", &out, "--json"]);
    assert_eq!((&mine["name"], &mine["stream_bytes_per_token"]), (&"mine".into(), &49_152.into()));
}

#[test]
fn layers_that_read_others_and_formats_with_scales_are_imported() {
    let config =
        |name: &str| format!("{}/../layout/testdata/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let import = |name: &str, formats: &[&str]| {
        let toml = succeeds(kvarts(&[&["model", "import", &config(name)], formats].concat()));
        file(&format!("{name}.toml"), &toml)
    };
    let sourced = import("deepseek_v41", &["--kv-dtype", "nvfp4", "--index-dtype", "fp4"]);
    let shown = json(&["model", "show", &sourced, "--json"]);
    assert_eq!(shown["stream_bytes_per_token"], 890);
    let part = |name: &str| {
        let parts = shown["parts"].as_array().unwrap();
        parts.iter().find(|part| part["name"] == name).unwrap().clone()
    };
    assert_eq!((&part("pairs")["layers"], &part("pairs")["readers"]), (&3.into(), &15.into()));
    assert_eq!((&part("window")["layers"], &part("window")["readers"]), (&40.into(), &0.into()));
    let page = succeeds(kvarts(&["model", "show", &sourced]));
    assert!(page.contains("tokens: stored by 1 layers, read by 19 later layers"), "{page}");
    let integers = import("qwen2", &["--kv-dtype", "int8"]);
    assert_eq!(json(&["model", "show", &integers, "--json"])["stream_bytes_per_token"], 28 * 4 * 2 * 132);
}

#[test]
fn a_faulty_spec_is_refused_with_the_place_of_the_fault() {
    let cases = [
        ("missing-field", SPEC.replace("bytes = 2048\n", ""), "line 9, column 1: missing field `bytes`"),
        ("negative", SPEC.replace("2048", "-2048"), "line 12, column 9: invalid value: integer `-2048`"),
        ("overflow", SPEC.replace("2048", "99999999999999999999"), "line 12, column 9: "),
        (
            "too-large",
            SPEC.replace("2048", "9223372036854775800"),
            "part.kv.bytes: the part has 9223372036854775800 bytes",
        ),
        ("zero-layers", SPEC.replace("repeat = 4", "repeat = 0"), "layers[0]: the run is empty"),
        (
            "no-layers",
            SPEC.replace("[{ repeat = 4, of = [\"full\"] }]", "[]"),
            "layers: the model has no layer",
        ),
        ("unknown-key", SPEC.replace("dtype", "type"), "line 13, column 1: unknown field `type`"),
        ("not-toml", "this is not TOML at all".to_owned(), "line 1, column "),
        ("empty", String::new(), "line 1, column 1: missing field `name`"),
        ("huge", format!("{SPEC}#{}", "x".repeat(10 << 20)), "a model spec can have at most 1048576 bytes"),
    ];
    for (name, text, expected) in cases {
        let path = file(&format!("{name}.toml"), text);
        let line = refusal(kvarts(&["model", "check", &path]));
        assert!(line.starts_with(&format!("{path}: {expected}")), "{name}: {line}");
        assert_eq!(refusal(kvarts(&["model", "show", &path])), line, "show says the same");
    }
    let binary = file("binary.toml", b"name = \"\xff\xfe\"");
    assert_eq!(
        refusal(kvarts(&["model", "check", &binary])),
        format!("{binary}: the file is not text: byte 8 is not UTF-8")
    );
}

#[test]
fn files_that_cannot_be_read_and_names_that_are_unknown_are_refused() {
    let folder = env!("CARGO_TARGET_TMPDIR");
    for command in ["check", "show", "import"] {
        assert_eq!(
            refusal(kvarts(&["model", command, folder])),
            format!("{folder}: the path is a directory, not a file")
        );
        let missing = format!("{folder}/no-such.toml");
        assert_eq!(refusal(kvarts(&["model", command, &missing])), format!("{missing}: no such file"));
    }
    let line = refusal(kvarts(&["model", "show", "lama-3.1-8b"]));
    assert_eq!(line, "no shipped model and no file is named `lama-3.1-8b`; did you mean `llama-3.1-8b`?");
    let line = refusal(kvarts(&["model", "show", "xyzzy"]));
    assert_eq!(line, "no shipped model and no file is named `xyzzy`; `kvarts model list` lists them");
    let line = refusal(kvarts(&["model", "show", "two\nlines"]));
    assert!(line.contains("`two lines`"), "{line}");
}

#[test]
fn questions_that_have_no_answer_are_refused() {
    let show = |arguments: &[&str]| refusal(kvarts(&[&["model", "show"], arguments].concat()));
    assert_eq!(
        show(&["deepseek-v4-pro", "--block-tokens", "100"]),
        "deepseek-v4-pro: a block has 100 tokens: use a multiple of 128, up to 1048576"
    );
    assert_eq!(
        show(&["llama-3.1-8b", "--tokens", "18446744073709551615"]),
        "llama-3.1-8b: the number of bytes does not fit into 64 bits"
    );
    assert!(show(&["llama-3.1-8b", "--tp", "3"]).starts_with("llama-3.1-8b: "));
    assert!(show(&["llama-3.1-8b", "--tp", "0"]).contains("'0'"));
    assert!(show(&["llama-3.1-8b", "--tokens", "-1"]).contains("'-1'"));
    assert!(show(&["llama-3.1-8b", "--block-tokens", "99999999999"]).contains("'99999999999'"));
    assert!(show(&[]).contains("<NAME|FILE>"));
}

#[test]
fn a_faulty_configuration_is_refused_with_the_missing_fact() {
    let import = |name: &str, text: &str| refusal(kvarts(&["model", "import", &file(name, text)]));
    let line = import("headless.json", &CONFIG.replace("num_key_value_heads", "heads"));
    assert!(
        line.ends_with("num_key_value_heads: the field is missing; expected the number of KV heads"),
        "{line}"
    );
    let line = import("unknown.json", &CONFIG.replace("\"qwen3_moe\"", "\"zamba9\""));
    assert!(
        line.contains(
            "the architecture `zamba9` is not supported, because these facts about the \
            architecture are missing: "
        ),
        "{line}"
    );
    let line = import("broken.json", "{\"model_type\": ");
    assert!(line.contains("line 1, column 15: the text is not valid JSON"), "{line}");
    let line = import("huge.json", &" ".repeat(10 << 20));
    assert!(line.ends_with("a model configuration can have at most 1048576 bytes"), "{line}");
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let mut child = start(&["model", "show", "-", "--json"]);
    drop(child.stdout.take());
    child.stdin.take().unwrap().write_all(SPEC.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    // What a shell says of a program that a closed pipe ended.
    assert_eq!(output.status.code(), Some(141));
    assert_eq!(output.stderr, b"");
}

#[test]
fn a_question_without_a_subcommand_is_told_where_they_stand() {
    assert_eq!(refusal(kvarts(&[])), "a subcommand is required: `--help` lists the subcommands");
    assert!(succeeds(kvarts(&["--help"])).contains("Usage: kvarts"));
    assert!(succeeds(kvarts(&["--version"])).starts_with("kvarts "));
}
