//! `kvarts identity`: a template of the file that `--identity` names.
//!
//! Whatever decides the bytes of a block stands in it, each field with a comment; what the program can know is filled in.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvarts_layout::{Geometry, ModelSpec};

use crate::{files, model_cmd};
use kvarts_terminal::Failure;

/// Arguments of `kvarts identity`.
#[derive(Args, Debug)]
pub(crate) struct IdentityArgs {
    /// The model: the name of a shipped model, or the file of a spec
    #[arg(long, value_name = "NAME|FILE", required_unless_present = "page_bytes")]
    model: Option<PathBuf>,
    /// Instead of a model: flat pages with this number of bytes
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::bytes, conflicts_with = "model")]
    page_bytes: Option<u64>,
    /// The engine that arranges the bytes, if it is not this program
    #[arg(long)]
    engine: Option<Engine>,
    /// The revision of the weights: a commit or digest
    #[arg(long, default_value = "")]
    revision: String,
    /// Tokens of a block [default: the engine's, or the model's]
    #[arg(long, value_name = "NUMBER")]
    block_tokens: Option<u32>,
    /// Write the template to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace an existing file
    #[arg(long, requires = "out")]
    force: bool,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Engine {
    Vllm,
    Sglang,
    Lmcache,
}

impl Engine {
    fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Lmcache => "lmcache",
        }
    }

    /// What it has in a block unless it is told otherwise, and the option that tells it.
    fn block(self) -> (u32, &'static str) {
        match self {
            Self::Vllm => (16, "vLLM's --block-size"),
            Self::Sglang => (1, "SGLang's --page-size"),
            Self::Lmcache => (256, "LMCache's chunk_size"),
        }
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &IdentityArgs, out: &mut dyn Write) -> Result<(), Failure> {
    let text = match (&arguments.model, arguments.page_bytes) {
        (Some(name), _) => {
            let spec = model_cmd::find(name)?;
            let given = name.display().to_string();
            template(arguments, &Known::of(&spec, &given))?
        }
        (None, Some(bytes)) => {
            let geometry = Geometry::opaque(bytes).map_err(Failure::user)?;
            template(arguments, &Known::pages(geometry, bytes))?
        }
        (None, None) => return Err(Failure::user("--model NAME or --page-bytes SIZE is required")),
    };
    match &arguments.out {
        Some(file) => files::write_text(file, &text, arguments.force),
        None => Ok(write!(out, "{text}")?),
    }
}

/// What is known of a model.
struct Known {
    name: String,
    /// How commands name it.
    given: String,
    dtype: String,
    block_tokens: u32,
    geometry: Geometry,
}

impl Known {
    fn of(spec: &ModelSpec, given: &str) -> Self {
        Self {
            name: spec.name().to_owned(),
            given: format!("--model {given}"),
            dtype: spec.parts().first().map_or_else(String::new, |part| part.dtype.clone()),
            block_tokens: spec.default_block_tokens(),
            geometry: spec.geometry().clone(),
        }
    }

    fn pages(geometry: Geometry, bytes: u64) -> Self {
        let (name, given) = (String::new(), format!("--page-bytes {bytes}"));
        Self { name, given, dtype: String::new(), block_tokens: 16, geometry }
    }

    /// Tokens of a block, and who says so.
    fn block_tokens(&self, arguments: &IdentityArgs) -> Result<(u32, &'static str), Failure> {
        let of_engine = arguments.engine.map(Engine::block);
        if let Some(tokens) = arguments.block_tokens {
            self.geometry.check_block_tokens(tokens).map_err(Failure::user)?;
            return Ok((tokens, of_engine.map_or("chosen by you", |(_, option)| option)));
        }
        Ok(match of_engine.filter(|(tokens, _)| self.geometry.check_block_tokens(*tokens).is_ok()) {
            Some((tokens, option)) => (tokens, option),
            None => (self.block_tokens, "chosen by you"),
        })
    }
}

fn template(arguments: &IdentityArgs, known: &Known) -> Result<String, Failure> {
    let (tokens, says) = known.block_tokens(arguments)?;
    let arrangement = match arguments.engine {
        None => [
            ("engine", "kvarts", "this program: blocks in canonical form, [layer][part]"),
            ("layout", "canonical", ""),
            ("version", "1", ""),
        ],
        Some(engine) => [
            ("engine", engine.name(), "the engine that has this memory layout"),
            ("layout", "", "the engine's name for the layout, such as NHD or HND"),
            ("version", "", "the engine's version: another version may arrange bytes differently"),
        ],
    };
    let field = |name: &str, value: &str, comment: &str| {
        let comment = match (value.is_empty(), comment.is_empty()) {
            (true, _) => format!("  # FILL IN: {comment}"),
            (false, true) => String::new(),
            (false, false) => format!("  # {comment}"),
        };
        format!("{name} = {value:?}{comment}\n")
    };
    let mut text = format!(
        "# An identity: everything that determines the bytes of a block, apart from its tokens.\n\
         # Blocks are found again only under an identity that is equal in every field.\n\
         # Use this file with: {} --identity THIS-FILE\n\n",
        known.given
    );
    text +=
        &field("model", &known.name, "the name of the model, as you choose; use the same name everywhere");
    text += &field("revision", &arguments.revision, "the commit or digest of the weights, not a branch");
    text += &field("kv_dtype", &known.dtype, "the type of the cached numbers, such as bf16 or fp8");
    text += &format!("block_tokens = {tokens}  # {says}\n\n");
    text += "# Absent fields mean \"none\". Remove the # before each field that the engine has.\n\
             # tokenizer = \"none\"  # with its revision, if it is not the model's own tokenizer\n\
             # adapter = \"none\"    # LoRA: name and revision\n\
             # rope = \"none\"       # scaling, if it differs from the model's configuration\n\
             # window = \"none\"     # the attention window, if it differs from the model's configuration\n\
             # The fingerprint of the spec follows from --model or --page-bytes.\n\n\
             [arrangement]\n";
    arrangement.iter().for_each(|(name, value, comment)| text += &field(name, value, comment));
    text += "\n# [quantisation]     # of the cache, if it is quantised\n\
             # recipe = \"none\"\n\
             # scales = \"none\"\n\n\
             # [extras]           # anything else that determines the bytes, under names of your choice\n";
    Ok(text)
}
