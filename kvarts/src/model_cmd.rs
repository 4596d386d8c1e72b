//! `kvarts model`: what is known about models' state, and specs of the user's own.

mod report;
mod text;
mod windows;

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use kvarts_layout::import::{self, Dtype, ImportOptions, IndexDtype};
use kvarts_layout::spec::{MAX_SPEC_BYTES, ModelSpec, shipped};

use crate::files;
use kvarts_terminal::Failure;

use report::{Question, Report};

/// Arguments of `kvarts model`.
#[derive(Args, Debug)]
pub(crate) struct ModelArgs {
    #[command(subcommand)]
    command: ModelCommand,
}

#[derive(Subcommand, Debug)]
enum ModelCommand {
    /// List the models whose specs are shipped
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the state of a model: bytes of each part, of a token, a boundary and a prefix
    Show(ShowArgs),
    /// Make a spec from the config.json of a Hugging Face checkpoint
    Import(ImportArgs),
    /// Check a spec of your own
    Check {
        /// The spec, or `-` for standard input
        file: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args, Debug)]
struct ShowArgs {
    /// A shipped model, or the file of a spec
    #[arg(value_name = "NAME|FILE")]
    model: PathBuf,
    /// Tokens of the prefix whose bytes are counted
    #[arg(long, default_value_t = 32_768)]
    tokens: u64,
    /// Tokens of a block, instead of the spec's own
    #[arg(long)]
    block_tokens: Option<u32>,
    /// Number of tensor-parallel ranks that share the state
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    tp: Option<u16>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct ImportArgs {
    /// The config.json, or `-` for standard input
    file: PathBuf,
    /// Write the spec to this file instead of standard output
    #[arg(long)]
    out: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long, requires = "out")]
    force: bool,
    /// The spec's name
    #[arg(long)]
    name: Option<String>,
    /// Number format of the cache, if it is not the model's own
    #[arg(long)]
    kv_dtype: Option<DtypeArg>,
    /// Number format of a recurrent state, if it differs from the configuration
    #[arg(long)]
    state_dtype: Option<DtypeArg>,
    /// Number format of an indexer's keys
    #[arg(long, default_value = "fp8")]
    index_dtype: IndexDtypeArg,
    /// Default number of tokens in a block
    #[arg(long)]
    block_tokens: Option<u32>,
    /// Include draft (multi-token-prediction) layers, for an engine that decodes with them
    #[arg(long)]
    draft_layers: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum DtypeArg {
    Bf16,
    Fp16,
    Fp32,
    Fp8,
    Int8,
    Nvfp4,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum IndexDtypeArg {
    Fp8,
    Fp4,
}

impl From<DtypeArg> for Dtype {
    fn from(argument: DtypeArg) -> Self {
        match argument {
            DtypeArg::Bf16 => Self::Bf16,
            DtypeArg::Fp16 => Self::Fp16,
            DtypeArg::Fp32 => Self::Fp32,
            DtypeArg::Fp8 => Self::Fp8,
            DtypeArg::Int8 => Self::Int8,
            DtypeArg::Nvfp4 => Self::Nvfp4,
        }
    }
}

/// Runs one of the subcommands.
pub(crate) fn run(arguments: &ModelArgs, out: &mut dyn Write) -> Result<(), Failure> {
    match &arguments.command {
        ModelCommand::List { json } => list(*json, out),
        ModelCommand::Show(arguments) => show(arguments, out),
        ModelCommand::Import(arguments) => import(arguments, out),
        ModelCommand::Check { file, json } => check(file, *json, out),
    }
}

fn list(json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let reports = shipped::names()
        .filter_map(shipped::load)
        .map(|spec| Report::new(&spec, &Question::default()).map_err(Failure::user))
        .collect::<Result<Vec<_>, _>>()?;
    if json {
        let rows: Vec<_> = reports.iter().map(Report::summary).collect();
        return print_json(&rows, out);
    }
    Ok(write!(out, "{}", text::list(&reports))?)
}

fn show(arguments: &ShowArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let spec = find(&arguments.model)?;
    let question =
        Question { tokens: arguments.tokens, block_tokens: arguments.block_tokens, ranks: arguments.tp };
    let report = Report::new(&spec, &question)
        .map_err(|error| Failure::User(format!("{}: {error}", arguments.model.display())))?;
    match arguments.json {
        true => print_json(&report, out),
        false => Ok(write!(out, "{}", text::show(&spec, &report))?),
    }
}

/// A shipped model, or the file of that name.
pub(crate) fn find(model: &Path) -> Result<ModelSpec, Failure> {
    let name = model.to_string_lossy();
    if let Some(spec) = shipped::load(&name) {
        return Ok(spec);
    }
    let is_path = name.contains('/') || name.ends_with(".toml") || name == "-" || model.exists();
    if is_path {
        return load(model);
    }
    let hint = match shipped::similar(&name) {
        Some(similar) => format!("did you mean `{similar}`?"),
        None => "`kvarts model list` lists them".to_owned(),
    };
    Err(Failure::User(format!("no shipped model and no file is named `{name}`; {hint}")))
}

fn load(file: &Path) -> Result<ModelSpec, Failure> {
    let text = files::read_text(file, MAX_SPEC_BYTES, "a model spec")?;
    ModelSpec::parse(&text).map_err(|error| {
        let shown = file.display();
        match text.trim_start().starts_with('{') {
            true => Failure::User(format!(
                "{shown} is JSON, but a model spec must be TOML: `kvarts model import {shown} --out \
                SPEC.toml` makes a spec from a Hugging Face configuration"
            )),
            false => Failure::User(format!("{shown}: {error}")),
        }
    })
}

fn import(arguments: &ImportArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let json = files::read_text(&arguments.file, import::MAX_CONFIG_BYTES, "a model configuration")?;
    let options = ImportOptions {
        name: arguments.name.clone(),
        kv_dtype: arguments.kv_dtype.map(Dtype::from),
        state_dtype: arguments.state_dtype.map(Dtype::from),
        index_dtype: match arguments.index_dtype {
            IndexDtypeArg::Fp8 => IndexDtype::Fp8,
            IndexDtypeArg::Fp4 => IndexDtype::Fp4,
        },
        block_tokens: arguments.block_tokens,
        draft_layers: arguments.draft_layers,
    };
    let spec = import::import_hf_config(&json, &options)
        .map_err(|error| Failure::User(format!("{}: {error}", arguments.file.display())))?;
    match &arguments.out {
        Some(file) => files::write_text(file, &spec.to_toml(), arguments.force),
        None => Ok(write!(out, "{}", spec.to_toml())?),
    }
}

fn check(file: &Path, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let spec = load(file)?;
    let report = Report::new(&spec, &Question::default())
        .map_err(|error| Failure::User(format!("{}: {error}", file.display())))?;
    match json {
        true => print_json(&report.summary(), out),
        false => Ok(writeln!(out, "{}: {}", file.display(), text::check(&spec, &report))?),
    }
}

fn print_json(value: &impl serde::Serialize, out: &mut dyn Write) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(std::io::Error::from)?;
    Ok(writeln!(out)?)
}
