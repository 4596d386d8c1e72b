//! Blocks as an engine's connector describes them: what decides their bytes, how they are cut into groups and ranks, and what a prefix needs.
//!
//! Every binding for another language takes the same words for it.

use std::collections::BTreeMap;
use std::fmt;

use crate::identity::{Arrangement, IdentityError, Quantisation};
use crate::prefix::{Absence, Need, Requirement, Requirements};
use crate::spec::{Kind, ModelSpec, PartGeometry, Role, shipped};
use crate::{BlockShape, Coordinate, Geometry, Group, Identity};

/// The most ranks, and page sizes, of a handle.
const RANKS_MAX: u16 = 1024;
const GROUPS_MAX: usize = 64;

/// What is wrong with a description.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CutError {
    /// Which of the words.
    pub argument: &'static str,
    /// What is wrong with it.
    pub why: String,
}

impl fmt::Display for CutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.argument, self.why)
    }
}

impl std::error::Error for CutError {}

fn wrong_at(argument: &'static str, why: impl fmt::Display) -> CutError {
    CutError { argument, why: why.to_string() }
}

/// What decides the bytes of blocks beside their cut: as [`Identity`] has it, the arrangement in three words; and of how many ranks this is which.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "the fields of `Identity` with the same names are documented")]
pub struct Wanted {
    pub model: String,
    pub revision: String,
    pub dtype: String,
    pub engine: String,
    pub layout: String,
    pub layout_version: String,
    pub block_tokens: u32,
    pub tokenizer: String,
    pub adapter: String,
    pub quantisation: String,
    pub scales: String,
    pub rope: String,
    pub window: String,
    pub extras: BTreeMap<String, String>,
    pub tp_size: u16,
    pub tp_rank: u16,
    /// Of which groups a prefix needs not all blocks, but those of its last tokens: how many tokens; 0 is the last block alone. It decides
    /// no bytes.
    pub windows: BTreeMap<u32, u32>,
}

/// The blocks of an identity.
#[derive(Clone, Debug)]
pub struct Cut {
    /// What they are.
    pub identity: Identity,
    /// How they are cut.
    pub geometry: Geometry,
    /// What a prefix of them needs.
    pub requirements: Requirements,
    /// The rank that is meant where none is said.
    pub tp_rank: u16,
    /// The coordinate of each rank, by group; and the shape of its blocks.
    pub columns: Vec<(Group, u16, Coordinate, BlockShape)>,
}

impl Cut {
    /// Blocks of one group and rank; of its own rank where none is said.
    pub fn column(
        &self,
        group: u32,
        rank: Option<u16>,
    ) -> Result<(Group, Coordinate, &BlockShape), CutError> {
        let wanted = (Group(group), rank.unwrap_or(self.tp_rank));
        let found = self.columns.iter().find(|(group, rank, ..)| (*group, *rank) == wanted);
        match found {
            Some((group, _, coordinate, shape)) => Ok((*group, *coordinate, shape)),
            None if self.columns.iter().any(|(known, ..)| known.0 == group) => {
                Err(wrong_at("rank", format!("the rank {} does not exist in group {group}", wanted.1)))
            }
            None => Err(wrong_at("group", format!("the handle has no group {group}"))),
        }
    }

    /// Of flat pages, a size for each group; or of a spec: a shipped model's name, or a text.
    pub fn new(
        page_bytes: Option<BTreeMap<u32, u64>>,
        spec: Option<&str>,
        wanted: Wanted,
    ) -> Result<Self, CutError> {
        let ranks = wanted.tp_size;
        if ranks == 0 || ranks > RANKS_MAX {
            return Err(wrong_at("tp_size", format!("the value must be 1 to {RANKS_MAX}, not {ranks}")));
        }
        if wanted.tp_rank >= ranks {
            return Err(wrong_at(
                "tp_rank",
                format!("the rank is {}: ranks count from 0 to {}", wanted.tp_rank, ranks.saturating_sub(1)),
            ));
        }
        let (geometry, requirements) = match (page_bytes, spec) {
            (Some(sizes), None) => paged(&sizes, wanted.block_tokens, ranks)?,
            (None, Some(spec)) => modelled(spec, wanted.block_tokens, ranks)?,
            _ => return Err(wrong_at("page_bytes", "exactly one of page_bytes and spec is required")),
        };
        let requirements = within(&requirements, &wanted.windows)?;
        let mut columns = Vec::new();
        for group in geometry.groups() {
            for rank in 0..ranks {
                let coordinate = geometry.coordinate(group.group, ranks, rank);
                let coordinate = coordinate.map_err(|error| wrong_at("tp_size", error))?;
                // A group that has nothing at blocks of this size has no blocks.
                if let Ok(shape) = geometry.shape(group.group, coordinate, wanted.block_tokens) {
                    columns.push((group.group, rank, coordinate, shape));
                }
            }
        }
        let tp_rank = wanted.tp_rank;
        let identity = wanted.identity(&geometry);
        let checked = identity.validate();
        checked.map_err(|error| wrong_at(argument(&error), error))?;
        Ok(Self { identity, geometry, requirements, tp_rank, columns })
    }
}

/// The argument that an identity's field came from.
fn argument(error: &IdentityError) -> &'static str {
    let field = match error {
        IdentityError::Missing { field }
        | IdentityError::Unnamed { field }
        | IdentityError::Untidy { field }
        | IdentityError::TooLong { field, .. } => field,
        IdentityError::BlockTokens { .. } => "block_tokens",
        _ => "identity",
    };
    match field {
        "kv_dtype" => "dtype",
        "quantisation.recipe" => "quantisation",
        "quantisation.scales" => "scales",
        "arrangement.engine" => "engine",
        "arrangement.layout" => "layout",
        "arrangement.version" => "layout_version",
        "extras name" | "extras value" => "extras",
        field => field,
    }
}

impl Wanted {
    fn identity(self, geometry: &Geometry) -> Identity {
        let arrangement = Arrangement::new(&self.engine, &self.layout, &self.layout_version);
        let identity =
            Identity::new(&self.model, &self.revision, &self.dtype, arrangement, geometry, self.block_tokens);
        Identity {
            tokenizer: self.tokenizer,
            adapter: self.adapter,
            quantisation: Quantisation { recipe: self.quantisation, scales: self.scales },
            rope: self.rope,
            window: self.window,
            extras: self.extras,
            ..identity
        }
    }
}

/// Flat pages: a size for each group, as many parts as there are ranks.
fn paged(
    sizes: &BTreeMap<u32, u64>,
    block_tokens: u32,
    ranks: u16,
) -> Result<(Geometry, Requirements), CutError> {
    let wrong = |what: &dyn fmt::Display| wrong_at("page_bytes", what);
    if sizes.is_empty() || sizes.len() > GROUPS_MAX {
        return Err(wrong(&format!("the number of groups must be 1 to {GROUPS_MAX}, not {}", sizes.len())));
    }
    let kind = Kind::new("opaque").ok_or_else(|| wrong(&"no pages"))?;
    let heads = if ranks == 1 { 0 } else { ranks };
    let mut parts = Vec::new();
    for (group, &bytes) in sizes {
        let bytes = bytes.checked_mul(ranks.into()).ok_or_else(|| {
            wrong(
                &"the pages of all ranks together do not fit 64 bits: use smaller \
                pages",
            )
        })?;
        let role = Role::Page { bytes };
        parts.push(PartGeometry { kind: kind.clone(), role, heads, align: 1, group: Group(*group) });
    }
    let layers: Vec<Vec<u16>> = (0..).zip(&parts).map(|(at, _)| vec![at]).collect();
    let geometry = Geometry::new(&parts, &layers).map_err(|error| wrong(&error))?;
    let mut needs = Vec::new();
    for group in geometry.groups() {
        let coordinates = geometry.coordinates(group.group, ranks).map_err(|error| wrong(&error))?;
        needs.push(Requirement {
            group: group.group,
            coordinates,
            need: Need::All,
            absence: Absence::Required,
        });
    }
    let requirements = Requirements::new(block_tokens, needs);
    Ok((geometry, requirements.map_err(|error| wrong_at("block_tokens", error))?))
}

/// The same requirements, of which some groups need a window or their last block alone.
fn within(requirements: &Requirements, windows: &BTreeMap<u32, u32>) -> Result<Requirements, CutError> {
    let mut groups = requirements.groups().to_vec();
    for (wanted, &tokens) in windows {
        let group = groups.iter_mut().find(|known| known.group.0 == *wanted);
        let group = group.ok_or_else(|| wrong_at("windows", format!("the handle has no group {wanted}")))?;
        group.need = if tokens == 0 { Need::At } else { Need::Last { tokens } };
    }
    Requirements::new(requirements.block_tokens(), groups).map_err(|error| wrong_at("windows", error))
}

/// A model: one that is shipped, or a spec's text.
fn modelled(spec: &str, block_tokens: u32, ranks: u16) -> Result<(Geometry, Requirements), CutError> {
    let spec = match shipped::load(spec) {
        Some(spec) => spec,
        None if !spec.contains(['\n', '=']) => {
            let hint = match shipped::similar(spec) {
                Some(similar) => format!("did you mean {similar:?}?"),
                None => "run `kvarts model list` for the names".to_owned(),
            };
            let name: String = spec.chars().take(64).collect();
            return Err(wrong_at("spec", format!("no shipped model is named {name:?}; {hint}")));
        }
        None => ModelSpec::parse(spec).map_err(|error| {
            wrong_at(
                "spec",
                format!(
                    "the text is neither the name of a shipped model nor a valid spec: \
                {error}"
                ),
            )
        })?,
    };
    let requirements = spec.stored_requirements(block_tokens, ranks);
    let requirements = requirements.map_err(|error| wrong_at("block_tokens", error))?;
    Ok((spec.geometry().clone(), requirements))
}
