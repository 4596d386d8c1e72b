//! Model specs: what state a model keeps for a prefix, part by part and layer by layer.
//!
//! A [`ModelSpec`] is a [`Geometry`] (everything that moves bytes: order, kinds, sizes, alignment, heads, groups)
//! with descriptions around it (names, sources, data types, what the absence of a part costs). Only the geometry
//! is fingerprinted and kept by the store; descriptions may be corrected without any stored byte losing its
//! meaning. Both are within their limits by construction.
//!
//! Specs are written as TOML (see [`form`] for the keys), shipped for well-known models ([`shipped`]), or made
//! from the configuration of a checkpoint ([`crate::import`]).

mod canonical;
mod error;
mod fault;
pub mod form;
mod geometry;
mod kind;
mod limits;
mod ratio;
mod reads;
mod requirements;
pub mod shipped;
#[cfg(test)]
mod tests;
mod write;

pub use canonical::{CanonicalError, MAX_CANONICAL_BYTES};
pub use error::SpecError;
pub use fault::{FormError, FormFault, MAX_SPEC_BYTES, Place};
pub use geometry::{Geometry, GroupGeometry, PartGeometry, PrefixBytes, Role, RoleClass};
pub use kind::{KNOWN_KINDS, Kind, MAX_KIND_BYTES};
pub use limits::{MAX_PARTS, MAX_PARTS_PER_LAYER};
pub use ratio::Ratio;
pub use requirements::RequireError;

use crate::ids::{Fingerprint, Group};
pub use crate::prefix::Absence;

/// One part as a spec describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Its name in the spec.
    pub name: String,
    /// What of it moves bytes.
    pub geometry: PartGeometry,
    /// The data type, as text for people.
    pub dtype: String,
    /// What its absence costs.
    pub absence: Absence,
    /// Where its numbers come from, or what is special about it.
    pub note: String,
}

/// A kind of layer: layers of one kind have the same parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerKind {
    /// Its name in the spec.
    pub name: String,
    /// Indices of its parts in [`ModelSpec::parts`], in canonical order.
    pub parts: Vec<u16>,
    /// Indices of the parts that it reads of the last layer before it that keeps them, in order.
    pub reads: Vec<u16>,
}

/// A model's state, described. Made by [`ModelSpec::parse`], [`ModelSpec::opaque`], [`shipped::load`] or an import.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelSpec {
    name: String,
    source: String,
    note: String,
    block_tokens: u32,
    parts: Vec<Part>,
    layer_kinds: Vec<LayerKind>,
    layers: Vec<u16>,
    geometry: Geometry,
}

/// Block tokens of a spec that says nothing else: the granularity that most engines and caches share.
pub const DEFAULT_BLOCK_TOKENS: u32 = 256;

impl ModelSpec {
    /// A spec of flat pages of `bytes_per_block`, for engines that hand over blocks whose inside only they know.
    /// Sizes do not depend on the block tokens, which are [`DEFAULT_BLOCK_TOKENS`] for want of a better number.
    pub fn opaque(name: &str, bytes_per_block: u64) -> Result<Self, FormError> {
        let page = form::DraftPart {
            name: "page".to_owned(),
            kind: "opaque".to_owned(),
            role: Role::Page { bytes: bytes_per_block },
            heads: 0,
            align: 1,
            group: None,
            dtype: "opaque".to_owned(),
            absence: Absence::Required,
            note: String::new(),
        };
        form::Draft {
            name: name.to_owned(),
            source: "pages of an engine, stored without changes".to_owned(),
            note: String::new(),
            block_tokens: DEFAULT_BLOCK_TOKENS,
            parts: vec![page],
            layer_kinds: vec![("page".to_owned(), vec!["page".to_owned()])],
            reads: Vec::new(),
            runs: vec![form::Run { repeat: 1, of: vec!["page".to_owned()] }],
        }
        .finish()
    }

    /// The spec that a TOML text describes. The error names the place of the fault; a text past
    /// [`MAX_SPEC_BYTES`] is refused unread.
    pub fn parse(text: &str) -> Result<Self, FormError> {
        form::parse(text)
    }

    /// The spec as TOML that [`ModelSpec::parse`] reads back to an equal spec.
    pub fn to_toml(&self) -> String {
        write::to_toml(self)
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the numbers come from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// What else a reader should know; may be empty.
    pub fn note(&self) -> &str {
        &self.note
    }

    /// The default block tokens: valid for this geometry.
    pub fn default_block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// What moves bytes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The parts, in the order of first use.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The kinds of layers, in the order of first use.
    pub fn layer_kinds(&self) -> &[LayerKind] {
        &self.layer_kinds
    }

    /// The layers in execution order.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = Option<&LayerKind>> {
        self.layers.iter().map(|&kind| self.layer_kinds.get(usize::from(kind)))
    }

    /// The layers in execution order as repeated runs of layer kinds: how often, and which.
    pub fn layer_runs(&self) -> Vec<(usize, Vec<&str>)> {
        let name = |&kind: &u16| Some(self.layer_kinds.get(usize::from(kind))?.name.as_str());
        write::runs(&self.layers)
            .into_iter()
            .map(|(repeat, kinds)| (repeat, kinds.iter().filter_map(name).collect()))
            .collect()
    }

    /// How many layers have each part of [`ModelSpec::parts`].
    pub fn layers_by_part(&self) -> Vec<u64> {
        self.count_by_part(|kind| &kind.parts)
    }

    /// How many layers read each part of [`ModelSpec::parts`] of another layer.
    pub fn readers_by_part(&self) -> Vec<u64> {
        self.count_by_part(|kind| &kind.reads)
    }

    /// What the absence of a group's block costs: the worst among the parts that store something in blocks of
    /// this many tokens. `None` if none does, or if there is no such group.
    pub fn group_absence(&self, group: Group, block_tokens: u32) -> Option<Absence> {
        let stored = |part: &&Part| part.geometry.role.stored_bytes(block_tokens) != Some(0);
        let parts = self.parts.iter().filter(|part| part.geometry.group == group);
        parts.filter(stored).map(|part| part.absence).max()
    }

    fn count_by_part(&self, of: impl Fn(&LayerKind) -> &Vec<u16>) -> Vec<u64> {
        let mut counts = vec![0u64; self.parts.len()];
        for &part in self.layers().flatten().flat_map(of) {
            if let Some(count) = counts.get_mut(usize::from(part)) {
                *count = count.saturating_add(1);
            }
        }
        counts
    }

    /// The geometry's fingerprint.
    pub fn fingerprint(&self) -> Fingerprint {
        self.geometry.fingerprint()
    }
}
