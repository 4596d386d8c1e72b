//! The text form of a model spec, and the checks that turn it into one.
//!
//! ```toml
//! name = "my-model"                   # letters, digits, '.', '_', '-', '/'
//! source = "where the numbers come from"
//! note = "anything else"              # optional
//! block_tokens = 256                  # tokens of a block unless others are asked for
//! layers = [                          # layer kinds in execution order; each run may be repeated
//!     { repeat = 2, of = ["swa"] },
//!     { repeat = 20, of = ["csa", "swa"] },
//!     { of = ["csa"] },
//! ]
//!
//! [layer]                             # the parts of each kind of layer, in the order in which they are stored
//! swa = ["window"]
//! csa = ["csa", "window"]
//!
//! # What a kind of layer reads of the last layer before it that keeps that part. It takes no bytes: a part is kept
//! # once for all that read it.
//! # [reads]
//! # reader = ["csa"]
//!
//! [part.csa]
//! kind = "csa_main"                   # what the bytes are: a registered kind or a name of your own
//! role = "stream"                     # stream, page, window or state
//! bytes = 584                         # stream: of an entry; page: of a block; window: of a token; state: in all
//! per_tokens = 4                      # stream: tokens that one entry covers (1)
//! dtype = "fp8"                       # text for people
//! heads = 0                           # heads that ranks can share out; 0 means every rank holds the whole (0)
//! align = 1                           # alignment in a payload (1)
//! group = 0                           # streams 0, windows 1, states 2 unless given
//! note = "why these numbers"          # optional
//!
//! [part.window]
//! kind = "swa_window"
//! role = "window"
//! bytes = 584
//! window_tokens = 128                 # window: how many tokens
//! dtype = "fp8"
//! recompute_tokens = 5504             # tokens to replay when it is not there; without this key it is required
//! # A state may say `empty_at_multiple_of = 128`: it holds nothing at such boundaries.
//! ```
//!
//! Unknown keys are refused. Every error says where: a line and column while the text is read, a key after that.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use serde::Deserialize;

use crate::ids::Group;
use crate::shape::MAX_LAYERS;

use super::error::SpecError;
use super::fault::{FormError, FormFault, MAX_SPEC_BYTES, Place, at, printable};
use super::geometry::{Geometry, PartGeometry, Role};
use super::kind::Kind;
use super::limits::MAX_PARTS_PER_LAYER;
use super::reads;
use super::{Absence, LayerKind, ModelSpec, Part};

/// The most bytes a name of a model, a layer kind or a part may have.
pub const MAX_NAME_BYTES: usize = 128;
/// The most bytes a free text may have.
pub const MAX_TEXT_BYTES: usize = 4096;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    name: String,
    source: String,
    #[serde(default)]
    note: String,
    block_tokens: u32,
    layers: Vec<Run>,
    layer: BTreeMap<String, Vec<String>>,
    #[serde(default)]
    reads: BTreeMap<String, Vec<String>>,
    part: BTreeMap<String, PartForm>,
}

/// A sequence of layer kinds, repeated.
#[derive(Deserialize, Clone, PartialEq, Eq, Debug)]
#[serde(deny_unknown_fields)]
pub(crate) struct Run {
    #[serde(default = "one")]
    pub(crate) repeat: u32,
    pub(crate) of: Vec<String>,
}

fn one<N: From<u8>>() -> N {
    N::from(1)
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum RoleName {
    Stream,
    Page,
    Window,
    State,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PartForm {
    kind: String,
    role: RoleName,
    bytes: u64,
    per_tokens: Option<u32>,
    window_tokens: Option<u32>,
    empty_at_multiple_of: Option<NonZeroU32>,
    dtype: String,
    #[serde(default)]
    heads: u16,
    #[serde(default = "one")]
    align: u32,
    group: Option<u32>,
    recompute_tokens: Option<u64>,
    #[serde(default)]
    note: String,
}

/// What a spec is made of before it is checked.
pub(crate) struct Draft {
    pub(crate) name: String,
    pub(crate) source: String,
    pub(crate) note: String,
    pub(crate) block_tokens: u32,
    pub(crate) parts: Vec<DraftPart>,
    pub(crate) layer_kinds: Vec<(String, Vec<String>)>,
    pub(crate) reads: Vec<(String, Vec<String>)>,
    pub(crate) runs: Vec<Run>,
}

/// A part before it is checked.
#[derive(Clone)]
pub(crate) struct DraftPart {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) role: Role,
    pub(crate) heads: u16,
    pub(crate) align: u32,
    pub(crate) group: Option<Group>,
    pub(crate) dtype: String,
    pub(crate) absence: Absence,
    pub(crate) note: String,
}

pub(super) fn parse(text: &str) -> Result<ModelSpec, FormError> {
    if text.len() > MAX_SPEC_BYTES {
        return Err(FormError { place: Place::Whole, fault: FormFault::TooLarge });
    }
    let form: Form = toml::from_str(text).map_err(|error| {
        let message = in_plain_words(&error.message().lines().collect::<Vec<_>>().join(", "));
        FormError { place: place_in(text, error.span()), fault: FormFault::Text(message) }
    })?;
    let parts = form.part.into_iter().map(|(name, part)| draft_part(name, part)).collect::<Result<_, _>>()?;
    Draft {
        name: form.name,
        source: form.source,
        note: form.note,
        block_tokens: form.block_tokens,
        parts,
        layer_kinds: form.layer.into_iter().collect(),
        reads: form.reads.into_iter().collect(),
        runs: form.layers,
    }
    .finish()
}

/// The reader's message without the names of Rust's types.
fn in_plain_words(message: &str) -> String {
    let message = printable(message).replace(" as i128", "");
    let limits = [("u64", u64::MAX), ("u32", u32::MAX.into()), ("u16", u16::MAX.into())];
    limits.iter().fold(message, |message, (name, most)| {
        match message.strip_suffix(&format!("expected {name}")) {
            Some(rest) => format!("{rest}expected a whole number from 0 to {most}"),
            None => message,
        }
    })
}

fn place_in(text: &str, span: Option<std::ops::Range<usize>>) -> Place {
    let Some(before) = span.and_then(|span| text.get(..span.start)) else { return Place::Whole };
    let line = before.matches('\n').count().saturating_add(1);
    let column = before.rsplit('\n').next().map_or(0, |last| last.chars().count()).saturating_add(1);
    Place::Text { line, column }
}

fn draft_part(name: String, form: PartForm) -> Result<DraftPart, FormError> {
    let key = |key: &str| format!("part.{name}.{key}");
    let unwanted = |present: bool, which: &str| match present {
        true => Err(at(key(which), FormFault::Unwanted)),
        false => Ok(()),
    };
    let is = |role: RoleName| std::mem::discriminant(&role) == std::mem::discriminant(&form.role);
    unwanted(form.per_tokens.is_some() && !is(RoleName::Stream), "per_tokens")?;
    unwanted(form.window_tokens.is_some() && !is(RoleName::Window), "window_tokens")?;
    unwanted(form.empty_at_multiple_of.is_some() && !is(RoleName::State), "empty_at_multiple_of")?;
    let bytes = form.bytes;
    let role = match form.role {
        RoleName::Stream => Role::Stream { bytes, tokens: form.per_tokens.unwrap_or(1) },
        RoleName::Page => Role::Page { bytes },
        RoleName::Window => {
            let tokens = form.window_tokens.ok_or_else(|| at(key("window_tokens"), FormFault::Missing))?;
            Role::Window { bytes, tokens }
        }
        RoleName::State => Role::State { bytes, empty_at_multiple_of: form.empty_at_multiple_of },
    };
    let absence = form.recompute_tokens.map_or(Absence::Required, |tokens| Absence::Recompute { tokens });
    Ok(DraftPart {
        name,
        kind: form.kind,
        role,
        heads: form.heads,
        align: form.align,
        group: form.group.map(Group),
        dtype: form.dtype,
        absence,
        note: form.note,
    })
}

impl Draft {
    /// Checks everything after leaving out the parts that no layer has.
    pub(crate) fn finish_used(mut self) -> Result<ModelSpec, FormError> {
        let used: BTreeSet<String> = self.layer_kinds.iter().flat_map(|(_, parts)| parts).cloned().collect();
        self.parts.retain(|part| used.contains(&part.name));
        self.finish()
    }

    /// Checks everything and puts parts and layer kinds in the order of first use.
    pub(crate) fn finish(self) -> Result<ModelSpec, FormError> {
        let name_ok = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b'/');
        if self.name.is_empty() || self.name.len() > MAX_NAME_BYTES || !self.name.bytes().all(name_ok) {
            return Err(at("name", FormFault::Name));
        }
        check_text("source", &self.source)?;
        check_text("note", &self.note)?;
        let defined: BTreeMap<&str, &[String]> =
            self.layer_kinds.iter().map(|(name, parts)| (name.as_str(), parts.as_slice())).collect();
        let order = expand(&self.runs, &defined)?;
        if let Some(unused) = defined.keys().find(|name| !order.contains_kind(name)) {
            return Err(at(format!("layer.{unused}"), FormFault::Unused));
        }
        let (parts, mut layer_kinds) = self.link(&order, &defined)?;
        reads::link(&self.reads, &parts, &mut layer_kinds, &order.layers)?;
        let geometries: Vec<PartGeometry> = parts.iter().map(|part| part.geometry.clone()).collect();
        let layers: Vec<Vec<u16>> = order
            .layers
            .iter()
            .filter_map(|&kind| Some(layer_kinds.get(usize::from(kind))?.parts.clone()))
            .collect();
        let geometry = Geometry::new(&geometries, &layers).map_err(|error| locate(error, &parts))?;
        geometry
            .check_block_tokens(self.block_tokens)
            .map_err(|error| at("block_tokens", FormFault::Spec(error)))?;
        Ok(ModelSpec {
            name: self.name,
            source: self.source,
            note: self.note,
            block_tokens: self.block_tokens,
            parts,
            layer_kinds,
            layers: order.layers,
            geometry,
        })
    }

    /// Parts and layer kinds in the order of first use, layer kinds naming parts by index.
    fn link(
        &self,
        order: &Order,
        defined: &BTreeMap<&str, &[String]>,
    ) -> Result<(Vec<Part>, Vec<LayerKind>), FormError> {
        let drafts: BTreeMap<&str, &DraftPart> =
            self.parts.iter().map(|part| (part.name.as_str(), part)).collect();
        let mut places: BTreeMap<&str, u16> = BTreeMap::new();
        let mut parts = Vec::new();
        let mut layer_kinds = Vec::new();
        for kind in &order.kinds {
            let key = format!("layer.{kind}");
            let names = defined.get(kind.as_str()).copied().unwrap_or_default();
            if names.is_empty() || names.len() > MAX_PARTS_PER_LAYER {
                let layer = 0;
                return Err(at(key, FormFault::Spec(SpecError::LayerParts { layer })));
            }
            let mut indices = Vec::with_capacity(names.len());
            for name in names {
                let Some((name, draft)) = drafts.get_key_value(name.as_str()) else {
                    return Err(at(key, FormFault::Undefined(name.clone())));
                };
                let place = match places.get(name) {
                    Some(&place) => place,
                    None => {
                        let place = u16::try_from(parts.len())
                            .map_err(|_| at("part", FormFault::Spec(SpecError::TooManyParts)))?;
                        parts.push(draft.finish()?);
                        places.insert(name, place);
                        place
                    }
                };
                if indices.contains(&place) {
                    return Err(at(key, FormFault::Twice((*name).to_owned())));
                }
                indices.push(place);
            }
            layer_kinds.push(LayerKind { name: kind.clone(), parts: indices, reads: Vec::new() });
        }
        match drafts.keys().find(|name| !places.contains_key(*name)) {
            Some(unused) => Err(at(format!("part.{unused}"), FormFault::Unused)),
            None => Ok((parts, layer_kinds)),
        }
    }
}

impl DraftPart {
    fn finish(&self) -> Result<Part, FormError> {
        let key = |key: &str| format!("part.{}.{key}", self.name);
        if !is_key(&self.name) {
            return Err(at(format!("part.{}", self.name), FormFault::Name));
        }
        check_text(&key("dtype"), &self.dtype)?;
        check_text(&key("note"), &self.note)?;
        let geometry = PartGeometry {
            kind: Kind::new(&self.kind).ok_or_else(|| at(key("kind"), FormFault::Name))?,
            role: self.role,
            heads: self.heads,
            align: self.align,
            group: self.group.unwrap_or(self.role.class().default_group()),
        };
        geometry.check().map_err(|error| {
            let place = match (error.key(), self.role) {
                (Some(name), _) => key(name),
                (None, Role::Window { .. }) => key("window_tokens"),
                (None, Role::State { .. }) => key("empty_at_multiple_of"),
                (None, _) => key("per_tokens"),
            };
            at(place, FormFault::Spec(error))
        })?;
        Ok(Part {
            name: self.name.clone(),
            geometry,
            dtype: self.dtype.clone(),
            absence: self.absence,
            note: self.note.clone(),
        })
    }
}

/// The layers in execution order, as indices into the kinds, which stand in the order of first use.
struct Order {
    kinds: Vec<String>,
    layers: Vec<u16>,
    used: BTreeSet<String>,
}

impl Order {
    fn contains_kind(&self, name: &str) -> bool {
        self.used.contains(name)
    }
}

/// Unrolls the runs, which name at most [`MAX_LAYERS`] layers: counted before anything is unrolled.
fn expand(runs: &[Run], defined: &BTreeMap<&str, &[String]>) -> Result<Order, FormError> {
    let mut count = 0u64;
    let mut order = Order { kinds: Vec::new(), layers: Vec::new(), used: BTreeSet::new() };
    let mut places: BTreeMap<&str, u16> = BTreeMap::new();
    for (index, run) in runs.iter().enumerate() {
        let key = || format!("layers[{index}]");
        if run.repeat == 0 || run.of.is_empty() {
            return Err(at(key(), FormFault::EmptyRun));
        }
        let layers = (run.of.len() as u64).saturating_mul(run.repeat.into());
        count = count.saturating_add(layers);
        if count > MAX_LAYERS as u64 {
            return Err(at(key(), FormFault::Spec(SpecError::TooManyLayers)));
        }
        let mut indices = Vec::with_capacity(run.of.len());
        for name in &run.of {
            if !defined.contains_key(name.as_str()) {
                return Err(at(key(), FormFault::Undefined(name.clone())));
            }
            if !is_key(name) {
                return Err(at(format!("layer.{name}"), FormFault::Name));
            }
            // Fewer kinds than layers, and those are counted above.
            let next = u16::try_from(order.kinds.len()).unwrap_or(u16::MAX);
            let place = *places.entry(name).or_insert(next);
            if place == next {
                order.kinds.push(name.clone());
                order.used.insert(name.clone());
            }
            indices.push(place);
        }
        (0..run.repeat).for_each(|_| order.layers.extend_from_slice(&indices));
    }
    if order.layers.is_empty() {
        return Err(at("layers", FormFault::Spec(SpecError::NoLayers)));
    }
    Ok(order)
}

/// A name that needs no quotes as a TOML key.
fn is_key(name: &str) -> bool {
    let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.bytes().all(valid)
}

fn check_text(key: &str, text: &str) -> Result<(), FormError> {
    match text.len() > MAX_TEXT_BYTES {
        true => Err(at(key, FormFault::TooLong(MAX_TEXT_BYTES))),
        false => Ok(()),
    }
}

/// Gives a fault of the geometry its place: the first part that disagrees with an earlier one of its group, or
/// the key that the fault is about.
fn locate(error: SpecError, parts: &[Part]) -> FormError {
    let of_group = |group: Group| parts.iter().filter(move |part| part.geometry.group == group);
    let odd = match error {
        SpecError::MixedRoles { group } => {
            let class = of_group(group).next().map(|part| part.geometry.role.class());
            of_group(group)
                .find(|part| Some(part.geometry.role.class()) != class)
                .map(|part| format!("part.{}.group", part.name))
        }
        SpecError::MixedHeads { group } => {
            let heads = of_group(group).next().map(|part| part.geometry.heads);
            of_group(group)
                .find(|part| Some(part.geometry.heads) != heads)
                .map(|part| format!("part.{}.heads", part.name))
        }
        _ => error.key().map(str::to_owned),
    };
    at(odd.unwrap_or_else(|| "part".to_owned()), FormFault::Spec(error))
}
