//! The PTX of the kernels, which is in the program as text, is that of the sources beside it.
//!
//! The driver compiles it for its device, so it names the oldest version and architecture that are of use: newer drivers and
//! devices take it as well. `scripts/kernels ptx` makes it anew with NVRTC, which only that needs.
#![allow(clippy::disallowed_methods, reason = "writes files of the repository, when it is told to")]

use std::path::Path;

use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};

/// Each file of kernels: its name, its entries, source and PTX.
const KERNELS: [(&str, &[&str], &str, &str); 5] = [
    (
        "busy",
        &["kvarts_busy"],
        include_str!("../src/kernels/busy.cu"),
        include_str!("../src/kernels/busy.ptx"),
    ),
    (
        "crc32",
        &["kvarts_crc32", "kvarts_crc32_many"],
        include_str!("../src/kernels/crc32.cu"),
        include_str!("../src/kernels/crc32.ptx"),
    ),
    (
        "gather",
        &["kvarts_gather"],
        include_str!("../src/kernels/gather.cu"),
        include_str!("../src/kernels/gather.ptx"),
    ),
    (
        "slots",
        &["kvarts_slots"],
        include_str!("../src/kernels/slots.cu"),
        include_str!("../src/kernels/slots.ptx"),
    ),
    (
        "wait",
        &["kvarts_wait"],
        include_str!("../src/kernels/wait.cu"),
        include_str!("../src/kernels/wait.ptx"),
    ),
];

/// That of CUDA 11.0.
const VERSION: &str = ".version 7.0";

/// What the PTX of a source begins with.
fn head(name: &str, source: &str) -> String {
    format!(
        "// {name}.cu with the CRC-32 {:08x}, by scripts/kernels ptx\n",
        crc32fast::hash(source.as_bytes())
    )
}

#[test]
fn the_ptx_in_the_program_is_of_its_source_and_old_enough_for_every_driver() {
    for (name, entries, source, ptx) in KERNELS {
        assert!(ptx.starts_with(&head(name, source)), "{name}.cu has changed: run scripts/kernels ptx");
        for line in [VERSION, ".target sm_70", ".address_size 64"] {
            assert!(ptx.lines().any(|one| one == line), "{name}.ptx has no line {line}");
        }
        for entry in entries {
            assert!(ptx.contains(&format!(".visible .entry {entry}(")), "{name}.ptx has no {entry}");
        }
        assert!(ptx.is_ascii() && !ptx.contains('\0'));
    }
}

#[test]
#[ignore = "needs NVRTC, and writes into the repository: scripts/kernels ptx runs it"]
fn make_the_ptx_anew() {
    for (name, _, source, _) in KERNELS {
        let options = CompileOptions { arch: Some("compute_70"), ..CompileOptions::default() };
        let made = compile_ptx_with_opts(source, options).unwrap().to_src();
        // Nothing newer is used: an assembler is asked by the script.
        let older =
            |line: &str| if line.starts_with(".version ") { VERSION.to_owned() } else { line.to_owned() };
        let text: Vec<String> =
            made.trim_end_matches('\0').lines().map(|line| older(line).trim_end().to_owned()).collect();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/kernels/{name}.ptx"));
        std::fs::write(path, format!("{}{}\n", head(name, source), text.join("\n").trim_end())).unwrap();
    }
}
