//! Identity: everything that decides the bytes of a block besides its tokens, and the namespace it names.
//!
//! Two identities that differ in any field have different canonical encodings, hence different namespace ids,
//! and never see each other's bytes. The encoding is exact in both directions: `decode(encode(x)) == x`, and
//! `encode(decode(b)) == b` for every `b` that is accepted, so a namespace id can be recomputed from the
//! stored bytes alone. Nothing is normalised: text is compared byte by byte.
//!
//! The parallel rank is not part of an identity; it is a [`Coordinate`](crate::Coordinate).

use crate::ids::{Fingerprint, NamespaceId};
use crate::shape::MAX_BLOCK_TOKENS;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

mod difference;
mod file;
mod form;
mod slips;
#[cfg(test)]
mod tests;

pub use difference::{Difference, Nearest, nearest};
pub use form::IdentityForm;
pub use slips::{Doubt, dtype as meant_dtype};

/// What every canonical encoding begins with: a name and a version, padded with zero bytes.
pub const IDENTITY_DOMAIN: [u8; 16] = *b"kvarts.ident.v1\0";
/// The most bytes one text field may have: room for a RoPE configuration with a factor for each dimension.
pub const MAX_TEXT_BYTES: usize = 4096;
/// The most bytes a tenant salt may have.
pub const MAX_SALT_BYTES: usize = 64;
/// The most extras an identity may have.
pub const MAX_EXTRAS: usize = 64;
/// The most bytes the name of an extra may have.
pub const MAX_EXTRA_NAME_BYTES: usize = 256;
/// The most bytes the value of an extra may have.
pub const MAX_EXTRA_VALUE_BYTES: usize = 4096;
/// The most bytes a canonical encoding may have, whatever the fields are.
pub const MAX_IDENTITY_BYTES: usize = 1 << 16;
/// The most bytes of JSON or TOML that are read as an identity.
pub const MAX_IDENTITY_FILE_BYTES: usize = 1 << 20;
/// Text fields of an identity.
const TEXTS: usize = 12;
/// What a field says when the thing it describes does not exist (no adapter, no quantisation, no window).
pub const NONE: &str = "none";

/// How the cached numbers were quantised. Where they were not, both fields say [`NONE`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Quantisation {
    /// The recipe: what is grouped, to which type, rounded how. `none` is allowed.
    pub recipe: String,
    /// Where the scales come from: a digest of the calibrated ones, or how they are computed and stored.
    /// `none` is allowed.
    pub scales: String,
}

/// How the bytes of a page are arranged: two engines with equal page sizes must not share bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Arrangement {
    /// The engine that arranges the bytes.
    pub engine: String,
    /// The engine's name for the arrangement.
    pub layout: String,
    /// The version of that arrangement.
    pub version: String,
}

/// A tenant's salt: identities that differ only in it share nothing. Its bytes are never printed by `Debug`.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct TenantSalt(pub Vec<u8>);

impl TenantSalt {
    /// True where tenants are not told apart.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for TenantSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TenantSalt(redacted, {} bytes)", self.0.len())
    }
}

/// Everything that decides the bytes of a block besides its tokens.
///
/// The fields are open so that a caller can fill them in any order; whatever makes use of an identity goes
/// through [`Identity::encode`] or [`Identity::namespace_id`], which refuse one that is not complete.
///
/// In JSON and TOML the fields have these names (`kv-dtype` is read like `kv_dtype`), the fingerprint and the
/// salt are hexadecimal, what may be `none` may be left out, as salt and extras may, and an unknown field is refused:
/// [`IdentityForm`] reads both.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Identity {
    /// The model's name.
    pub model: String,
    /// The revision of its weights: a commit or digest, not a branch that moves.
    pub revision: String,
    /// The tokenizer and its revision. `none` is allowed.
    pub tokenizer: String,
    /// The adapter and its revision, or `none`.
    pub adapter: String,
    /// The type of the cached numbers.
    pub kv_dtype: String,
    /// How they were quantised.
    pub quantisation: Quantisation,
    /// The rotary embedding's configuration, or `none`.
    pub rope: String,
    /// The attention window's configuration, or `none`.
    pub window: String,
    /// How the bytes of a page are arranged.
    pub arrangement: Arrangement,
    /// Tokens in one block.
    pub block_tokens: u32,
    /// The fingerprint of the model spec.
    #[serde(serialize_with = "file::fingerprint")]
    pub spec_fingerprint: Fingerprint,
    /// The tenant's salt, empty where tenants are not told apart.
    #[serde(skip_serializing_if = "TenantSalt::is_empty")]
    pub tenant_salt: TenantSalt,
    /// Anything else that decides bytes, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub extras: BTreeMap<String, String>,
}

/// Why something is not an identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentityError {
    /// A mandatory field is empty.
    Missing {
        /// Its name.
        field: &'static str,
    },
    /// A field that every put must name says `none`.
    Unnamed {
        /// Its name.
        field: &'static str,
    },
    /// A text begins or ends with a space or holds a control character.
    Untidy {
        /// Its name.
        field: &'static str,
    },
    /// A field is past its limit.
    TooLong {
        /// Its name.
        field: &'static str,
        /// The most bytes (or entries, for `extras`) it may have.
        max: usize,
    },
    /// The number of tokens in a block is zero or past [`MAX_BLOCK_TOKENS`].
    BlockTokens {
        /// The number found.
        found: u32,
    },
    /// The whole encoding would be past [`MAX_IDENTITY_BYTES`].
    TooLarge,
    /// The bytes do not begin with [`IDENTITY_DOMAIN`].
    Version,
    /// The bytes end inside a field.
    Truncated {
        /// Its name.
        field: &'static str,
    },
    /// A fixed-size field has another size.
    Width {
        /// Its name.
        field: &'static str,
    },
    /// A text is not UTF-8.
    Utf8 {
        /// Its name.
        field: &'static str,
    },
    /// The extras are not in strictly increasing order of their names.
    ExtrasOrder,
    /// Bytes follow the last field.
    Trailing,
    /// The file is not JSON or TOML of the right form.
    File {
        /// The line at fault, from 1; 0 where the parser does not say.
        line: usize,
        /// What is wrong there, on one line.
        message: String,
    },
    /// A file lacks fields that decide bytes and have no default.
    Incomplete {
        /// Each of them, in the order of the encoding.
        fields: Vec<Lacking>,
    },
}

/// A field of a file that has to be named and is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lacking {
    /// Its name.
    pub field: &'static str,
    /// The line on which it is empty, or `none` where that cannot be, from 1; 0 where the parser does not say. Nothing where
    /// it is absent.
    pub line: Option<usize>,
}

impl fmt::Display for Lacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            None => write!(f, "{} (missing)", self.field),
            Some(0) => write!(f, "{} (empty, or \"none\")", self.field),
            Some(line) => write!(f, "{} (line {line}: empty, or \"none\")", self.field),
        }
    }
}

impl fmt::Display for IdentityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { field } => {
                let name =
                    "enter a value, or \"none\" if the model has no such value and the field allows \"none\"";
                write!(f, "identity: {field} is empty: {name}")
            }
            Self::Unnamed { field } => write!(f, "identity: {field} cannot be \"none\": enter a value"),
            Self::Untidy { field } => {
                write!(
                    f,
                    "identity: {field} has control characters, or spaces at its ends: remove \
                    these characters"
                )
            }
            Self::TooLong { field, max } => {
                write!(f, "identity: {field} is longer than {max} bytes: shorten {field}")
            }
            Self::BlockTokens { found } => {
                write!(f, "identity: block_tokens is {found}: use 1 to {MAX_BLOCK_TOKENS}")
            }
            Self::TooLarge => {
                write!(
                    f,
                    "identity: all fields together have more than {MAX_IDENTITY_BYTES} bytes: shorten \
                    fields"
                )
            }
            Self::Version => write!(
                f,
                "identity: this program cannot read the encoding version of the identity: use the \
                version of kvarts that wrote the identity"
            ),
            Self::Truncated { field } => {
                write!(f, "identity: the bytes end inside {field}: copy the identity again")
            }
            Self::Width { field } => {
                write!(f, "identity: {field} has the wrong size: encode the identity again")
            }
            Self::Utf8 { field } => write!(f, "identity: {field} is not UTF-8: encode the identity again"),
            Self::ExtrasOrder => write!(
                f,
                "identity: extras are repeated or not sorted: sort the extras by name, and give each name once"
            ),
            Self::Trailing => write!(f, "identity: bytes follow the last field: remove these bytes"),
            Self::File { line: 0, message } => write!(f, "identity: {message}"),
            Self::File { line, message } => write!(f, "identity: line {line}: {message}"),
            Self::Incomplete { fields } => {
                let fields: Vec<String> = fields.iter().map(Lacking::to_string).collect();
                write!(f, "identity: these fields are required and have no default: {}", fields.join(", "))
            }
        }
    }
}

impl std::error::Error for IdentityError {}

impl Arrangement {
    /// How this version of an engine arranges the bytes of a page.
    pub fn new(engine: &str, layout: &str, version: &str) -> Self {
        Self { engine: engine.to_owned(), layout: layout.to_owned(), version: version.to_owned() }
    }
}

impl Identity {
    /// What every identity must name. All else is `none` until it is set: tokenizer, adapter, quantisation, rotary embedding
    /// and window decide bytes where an engine has them.
    pub fn new(
        model: &str,
        revision: &str,
        kv_dtype: &str,
        arrangement: Arrangement,
        geometry: &crate::Geometry,
        block_tokens: u32,
    ) -> Self {
        let none = || "none".to_owned();
        Self {
            model: model.to_owned(),
            revision: revision.to_owned(),
            tokenizer: none(),
            adapter: none(),
            kv_dtype: kv_dtype.to_owned(),
            quantisation: Quantisation { recipe: none(), scales: none() },
            rope: none(),
            window: none(),
            arrangement,
            block_tokens,
            spec_fingerprint: geometry.fingerprint(),
            tenant_salt: TenantSalt(Vec::new()),
            extras: BTreeMap::new(),
        }
    }

    /// The namespace this identity names: BLAKE3 of its canonical encoding. Refuses what
    /// [`validate`](Self::validate) refuses.
    pub fn namespace_id(&self) -> Result<NamespaceId, IdentityError> {
        self.encode().map(|bytes| namespace_of(&bytes))
    }

    /// Accepts exactly the identities that can be encoded: every mandatory field named, every limit kept.
    pub fn validate(&self) -> Result<(), IdentityError> {
        for (field, text, may_be_none) in self.texts() {
            check_text(field, text, MAX_TEXT_BYTES)?;
            if !may_be_none && text == NONE {
                return Err(IdentityError::Unnamed { field });
            }
        }
        if self.block_tokens == 0 || self.block_tokens > MAX_BLOCK_TOKENS {
            return Err(IdentityError::BlockTokens { found: self.block_tokens });
        }
        if self.spec_fingerprint == Fingerprint::default() {
            return Err(IdentityError::Missing { field: "spec_fingerprint" });
        }
        check_length("tenant_salt", self.tenant_salt.0.len(), MAX_SALT_BYTES)?;
        check_length("extras", self.extras.len(), MAX_EXTRAS)?;
        for (name, value) in &self.extras {
            check_text("extras name", name, MAX_EXTRA_NAME_BYTES)?;
            check_length("extras value", value.len(), MAX_EXTRA_VALUE_BYTES)?;
        }
        if self.encoded_bytes() > MAX_IDENTITY_BYTES {
            return Err(IdentityError::TooLarge);
        }
        Ok(())
    }

    /// The canonical encoding, at most [`MAX_IDENTITY_BYTES`]: [`IDENTITY_DOMAIN`], then each field behind its
    /// length as u32 little-endian, in one fixed order.
    pub fn encode(&self) -> Result<Vec<u8>, IdentityError> {
        self.validate()?;
        let mut out = Vec::with_capacity(self.encoded_bytes());
        out.extend_from_slice(&IDENTITY_DOMAIN);
        for (_, text, _) in self.texts() {
            put_field(&mut out, text.as_bytes());
        }
        put_field(&mut out, &self.block_tokens.to_le_bytes());
        put_field(&mut out, self.spec_fingerprint.as_bytes());
        put_field(&mut out, &self.tenant_salt.0);
        put_length(&mut out, self.extras.len());
        for (name, value) in &self.extras {
            put_field(&mut out, name.as_bytes());
            put_field(&mut out, value.as_bytes());
        }
        Ok(out)
    }

    /// The one identity that encodes to exactly these bytes. Allocates at most the input's size.
    pub fn decode(bytes: &[u8]) -> Result<Self, IdentityError> {
        if bytes.len() > MAX_IDENTITY_BYTES {
            return Err(IdentityError::TooLarge);
        }
        let mut reader = Reader { rest: bytes.strip_prefix(&IDENTITY_DOMAIN).ok_or(IdentityError::Version)? };
        // A struct literal's fields are evaluated as they are written: this order is the encoding's.
        let identity = Self {
            model: reader.text("model")?,
            revision: reader.text("revision")?,
            tokenizer: reader.text("tokenizer")?,
            adapter: reader.text("adapter")?,
            kv_dtype: reader.text("kv_dtype")?,
            quantisation: Quantisation {
                recipe: reader.text("quantisation.recipe")?,
                scales: reader.text("quantisation.scales")?,
            },
            rope: reader.text("rope")?,
            window: reader.text("window")?,
            arrangement: Arrangement {
                engine: reader.text("arrangement.engine")?,
                layout: reader.text("arrangement.layout")?,
                version: reader.text("arrangement.version")?,
            },
            block_tokens: u32::from_le_bytes(reader.array("block_tokens")?),
            spec_fingerprint: Fingerprint(reader.array("spec_fingerprint")?),
            tenant_salt: TenantSalt(reader.field("tenant_salt")?.to_vec()),
            extras: reader.extras()?,
        };
        if !reader.rest.is_empty() {
            return Err(IdentityError::Trailing);
        }
        identity.validate()?;
        Ok(identity)
    }

    /// The text fields in the order of the encoding: name, text, and whether it may say `none`.
    fn texts(&self) -> [(&'static str, &str, bool); TEXTS] {
        [
            ("model", &self.model, false),
            ("revision", &self.revision, false),
            ("tokenizer", &self.tokenizer, true),
            ("adapter", &self.adapter, true),
            ("kv_dtype", &self.kv_dtype, false),
            ("quantisation.recipe", &self.quantisation.recipe, true),
            ("quantisation.scales", &self.quantisation.scales, true),
            ("rope", &self.rope, true),
            ("window", &self.window, true),
            ("arrangement.engine", &self.arrangement.engine, false),
            ("arrangement.layout", &self.arrangement.layout, false),
            ("arrangement.version", &self.arrangement.version, false),
        ]
    }

    fn encoded_bytes(&self) -> usize {
        let field = |length: usize| length.saturating_add(4);
        let texts = self.texts().iter().map(|(_, text, _)| field(text.len())).fold(0, usize::saturating_add);
        let extras =
            self.extras.iter().map(|(name, value)| field(name.len()).saturating_add(field(value.len())));
        let fixed =
            [IDENTITY_DOMAIN.len(), field(4), field(Fingerprint::BYTES), field(self.tenant_salt.0.len())];
        fixed.into_iter().chain(extras).fold(field(texts), usize::saturating_add)
    }
}

/// The namespace of an identity that is already encoded; the bytes are not checked.
pub fn namespace_of(encoded: &[u8]) -> NamespaceId {
    NamespaceId(*blake3::hash(encoded).as_bytes())
}

fn check_length(field: &'static str, length: usize, max: usize) -> Result<(), IdentityError> {
    if length > max { Err(IdentityError::TooLong { field, max }) } else { Ok(()) }
}

fn check_text(field: &'static str, text: &str, max: usize) -> Result<(), IdentityError> {
    if text.is_empty() {
        return Err(IdentityError::Missing { field });
    }
    check_length(field, text.len(), max)?;
    // ASCII only, so that every language gives the same answer whatever Unicode tables it has.
    let untidy =
        text.bytes().any(|byte| byte.is_ascii_control()) || text.starts_with(' ') || text.ends_with(' ');
    if untidy { Err(IdentityError::Untidy { field }) } else { Ok(()) }
}

/// Validated lengths are far below `u32::MAX`.
fn put_length(out: &mut Vec<u8>, length: usize) {
    out.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_field(out: &mut Vec<u8>, bytes: &[u8]) {
    put_length(out, bytes.len());
    out.extend_from_slice(bytes);
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn length(&mut self, field: &'static str) -> Result<usize, IdentityError> {
        let (length, rest) = self.rest.split_first_chunk::<4>().ok_or(IdentityError::Truncated { field })?;
        self.rest = rest;
        usize::try_from(u32::from_le_bytes(*length)).map_err(|_| IdentityError::Truncated { field })
    }

    fn field(&mut self, field: &'static str) -> Result<&'a [u8], IdentityError> {
        let length = self.length(field)?;
        let (bytes, rest) = self.rest.split_at_checked(length).ok_or(IdentityError::Truncated { field })?;
        self.rest = rest;
        Ok(bytes)
    }

    fn text(&mut self, field: &'static str) -> Result<String, IdentityError> {
        let text = std::str::from_utf8(self.field(field)?).map_err(|_| IdentityError::Utf8 { field })?;
        Ok(text.to_owned())
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], IdentityError> {
        self.field(field)?.try_into().map_err(|_| IdentityError::Width { field })
    }

    fn extras(&mut self) -> Result<BTreeMap<String, String>, IdentityError> {
        let count = self.length("extras")?;
        check_length("extras", count, MAX_EXTRAS)?;
        let mut extras: BTreeMap<String, String> = BTreeMap::new();
        for _ in 0..count {
            let name = self.text("extras name")?;
            if extras.last_key_value().is_some_and(|(last, _)| *last >= name) {
                return Err(IdentityError::ExtrasOrder);
            }
            let value = self.text("extras value")?;
            extras.insert(name, value);
        }
        Ok(extras)
    }
}
