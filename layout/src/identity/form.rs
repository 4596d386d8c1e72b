//! An identity as it stands in a file, before anything is known of its model: what may be `none` may be absent, the
//! fingerprint may follow from the model, and all that is missing is told at once, with its lines.

use super::file;
use super::slips::{self, Doubt};
use super::{
    Arrangement, Identity, IdentityError, Lacking, MAX_IDENTITY_FILE_BYTES, NONE, Quantisation, TenantSalt,
    check_length,
};
use crate::ids::Fingerprint;
use crate::spec::Geometry;
use serde::Deserialize;
use std::collections::BTreeMap;

/// A text of a file, and where it stands.
trait Placed {
    fn text(&self) -> &str;
    /// Its line, from 1; 0 if that is not known.
    fn line(&self, file: &str) -> usize;
}

impl Placed for String {
    fn text(&self) -> &str {
        self
    }

    fn line(&self, _: &str) -> usize {
        0
    }
}

impl Placed for toml::Spanned<String> {
    fn text(&self) -> &str {
        self.get_ref()
    }

    fn line(&self, file: &str) -> usize {
        line_at(file, self.span().start)
    }
}

fn line_at(file: &str, byte: usize) -> usize {
    file.get(..byte).map_or(0, |before| before.matches('\n').count().saturating_add(1))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, bound = "S: Deserialize<'de>", expecting = "a table with recipe and scales")]
struct QuantisationForm<S> {
    recipe: Option<S>,
    scales: Option<S>,
}

#[derive(Deserialize)]
#[serde(
    deny_unknown_fields,
    bound = "S: Deserialize<'de>",
    expecting = "a table with engine, layout and version"
)]
struct ArrangementForm<S> {
    engine: Option<S>,
    layout: Option<S>,
    version: Option<S>,
}

#[derive(Deserialize)]
#[serde(
    deny_unknown_fields,
    bound = "S: Deserialize<'de>",
    expecting = "a table with the fields of an identity"
)]
struct Form<S> {
    model: Option<S>,
    revision: Option<S>,
    tokenizer: Option<S>,
    adapter: Option<S>,
    #[serde(alias = "kv-dtype")]
    kv_dtype: Option<S>,
    #[serde(alias = "quantization")]
    quantisation: Option<QuantisationForm<S>>,
    rope: Option<S>,
    window: Option<S>,
    arrangement: Option<ArrangementForm<S>>,
    #[serde(alias = "block-tokens")]
    block_tokens: Option<u32>,
    #[serde(default, alias = "spec-fingerprint", deserialize_with = "file::read_fingerprint")]
    spec_fingerprint: Option<Fingerprint>,
    #[serde(default, alias = "tenant-salt")]
    tenant_salt: TenantSalt,
    #[serde(default, deserialize_with = "file::extras")]
    extras: BTreeMap<String, String>,
}

/// What a file says of an identity.
#[derive(Clone, Debug)]
pub struct IdentityForm {
    identity: Identity,
    has_fingerprint: bool,
    /// The line of the number format, 0 where it is not known.
    dtype_line: usize,
}

impl IdentityForm {
    /// From TOML: everything that is missing, each with its line, or the first other fault and its line.
    pub fn from_toml(text: &str) -> Result<Self, IdentityError> {
        check_length("file", text.len(), MAX_IDENTITY_FILE_BYTES)?;
        let form: Form<toml::Spanned<String>> = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| line_at(text, span.start));
            IdentityError::File { line, message: one_line(error.message()) }
        })?;
        form.read(text)
    }

    /// From JSON.
    pub fn from_json(text: &str) -> Result<Self, IdentityError> {
        check_length("file", text.len(), MAX_IDENTITY_FILE_BYTES)?;
        let form: Form<String> = serde_json::from_str(text).map_err(|error| IdentityError::File {
            line: error.line(),
            message: one_line(&error.to_string()),
        })?;
        form.read(text)
    }

    /// The identity of this model: a fingerprint that the file does not say is the model's.
    pub fn of(mut self, geometry: &Geometry) -> Result<Identity, IdentityError> {
        if !self.has_fingerprint {
            self.identity.spec_fingerprint = geometry.fingerprint();
        }
        self.identity.validate()?;
        Ok(self.identity)
    }

    /// A value that is probably a slip of the pen. It counts as it stands.
    pub fn doubt(&self) -> Option<Doubt> {
        let said = &self.identity.kv_dtype;
        let meant = slips::dtype(said)?;
        Some(Doubt { line: self.dtype_line, said: said.clone(), meant })
    }

    fn alone(self) -> Result<Identity, IdentityError> {
        if !self.has_fingerprint {
            let fields = vec![Lacking { field: "spec_fingerprint", line: None }];
            return Err(IdentityError::Incomplete { fields });
        }
        self.identity.validate()?;
        Ok(self.identity)
    }
}

impl<S: Placed> Form<S> {
    fn read(self, file: &str) -> Result<IdentityForm, IdentityError> {
        let mut lacking = Vec::new();
        let dtype_line = self.kv_dtype.as_ref().map_or(0, |one| one.line(file));
        let mut text = |field, found: Option<S>, may_be_none: bool| {
            let is_named = |one: &S| !one.text().is_empty() && (may_be_none || one.text() != NONE);
            match found {
                Some(one) if is_named(&one) => return one.text().to_owned(),
                None if may_be_none => return NONE.to_owned(),
                other => lacking.push(Lacking { field, line: other.map(|one| one.line(file)) }),
            }
            String::new()
        };
        let quantisation = self.quantisation.unwrap_or(QuantisationForm { recipe: None, scales: None });
        let arrangement =
            self.arrangement.unwrap_or(ArrangementForm { engine: None, layout: None, version: None });
        // Fields of a struct literal are evaluated as they are written.
        let identity = Identity {
            model: text("model", self.model, false),
            revision: text("revision", self.revision, false),
            tokenizer: text("tokenizer", self.tokenizer, true),
            adapter: text("adapter", self.adapter, true),
            kv_dtype: text("kv_dtype", self.kv_dtype, false),
            quantisation: Quantisation {
                recipe: text("quantisation.recipe", quantisation.recipe, true),
                scales: text("quantisation.scales", quantisation.scales, true),
            },
            rope: text("rope", self.rope, true),
            window: text("window", self.window, true),
            arrangement: Arrangement {
                engine: text("arrangement.engine", arrangement.engine, false),
                layout: text("arrangement.layout", arrangement.layout, false),
                version: text("arrangement.version", arrangement.version, false),
            },
            block_tokens: self.block_tokens.unwrap_or(0),
            spec_fingerprint: self.spec_fingerprint.unwrap_or_default(),
            tenant_salt: self.tenant_salt,
            extras: self.extras,
        };
        if self.block_tokens.is_none() {
            lacking.push(Lacking { field: "block_tokens", line: None });
        }
        match lacking.is_empty() {
            true => {
                Ok(IdentityForm { identity, has_fingerprint: self.spec_fingerprint.is_some(), dtype_line })
            }
            false => Err(IdentityError::Incomplete { fields: lacking }),
        }
    }
}

impl Identity {
    /// A valid identity from TOML that says its spec's fingerprint; otherwise as [`IdentityForm::from_toml`].
    pub fn from_toml(text: &str) -> Result<Self, IdentityError> {
        IdentityForm::from_toml(text)?.alone()
    }

    /// A valid identity from JSON that says its spec's fingerprint.
    pub fn from_json(text: &str) -> Result<Self, IdentityError> {
        IdentityForm::from_json(text)?.alone()
    }
}

fn one_line(message: &str) -> String {
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    slips::field(&line).unwrap_or(line)
}
