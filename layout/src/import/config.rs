//! Reads facts from a configuration: every number checked, every fault named by its field.

use std::cell::RefCell;
use std::rc::Rc;

use serde_json::{Map, Value};

use crate::shape::MAX_BLOCK_TOKENS;
use crate::shape::MAX_LAYERS;

use super::{Dtype, ImportError, ImportOptions};

/// The most characters of a value that an error repeats.
const MAX_SHOWN: usize = 60;

/// One object of the configuration, with the object around it.
pub(super) struct Config<'a> {
    map: &'a Map<String, Value>,
    outer: Option<&'a Map<String, Value>>,
    prefix: String,
    /// What was read, for the spec's source.
    facts: Rc<RefCell<Vec<String>>>,
}

/// A text as an error may repeat it: on one line, without control characters, not long.
pub(super) fn shorten(text: &str) -> String {
    let shown = printable(&text.chars().take(MAX_SHOWN).collect::<String>());
    let more = if text.chars().nth(MAX_SHOWN).is_some() { "..." } else { "" };
    format!("`{shown}{more}`")
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The message of a JSON error without its place, which is told apart.
pub(super) fn message_of(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let message = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message);
    printable(message)
}

impl<'a> Config<'a> {
    pub(super) fn top(value: &'a Value) -> Result<Self, ImportError> {
        let Value::Object(map) = value else {
            return Err(ImportError::Value {
                field: "config".to_owned(),
                found: shorten(&value.to_string()),
                expected: "an object".to_owned(),
            });
        };
        Ok(Self { map, outer: None, prefix: String::new(), facts: Rc::default() })
    }

    pub(super) fn nested(&self, key: &str, what: &'static str) -> Result<Self, ImportError> {
        match self.get(key) {
            Some(Value::Object(map)) => {
                Ok(Self { map, outer: Some(self.map), prefix: self.path(key), facts: Rc::clone(&self.facts) })
            }
            Some(other) => Err(self.value(key, other, "an object")),
            None => Err(self.missing(key, what)),
        }
    }

    /// The dotted path of a field.
    pub(super) fn path(&self, field: &str) -> String {
        if self.prefix.is_empty() { field.to_owned() } else { format!("{}.{field}", self.prefix) }
    }

    pub(super) fn has(&self, field: &str) -> bool {
        self.get(field).is_some()
    }

    pub(super) fn feature(&self, field: &str, reason: &'static str) -> ImportError {
        ImportError::Feature { field: self.path(field), reason }
    }

    /// A whole number from 1 to 2^20.
    pub(super) fn count(&self, field: &str, what: &'static str) -> Result<u32, ImportError> {
        let found = self.get(field).ok_or_else(|| self.missing(field, what))?;
        let count = number(found).filter(|&count| count > 0);
        let count = count.ok_or_else(|| self.value(field, found, "a whole number from 1 to 1048576"))?;
        self.note_fact(field, &count.to_string());
        Ok(count)
    }

    /// A whole number from 1 to 65,535.
    pub(super) fn heads(&self, field: &str, what: &'static str) -> Result<u16, ImportError> {
        let count = self.count(field, what)?;
        u16::try_from(count).map_err(|_| ImportError::Value {
            field: self.path(field),
            found: count.to_string(),
            expected: "at most 65535".to_owned(),
        })
    }

    /// The number of layers, within the limit of a spec.
    pub(super) fn layer_count(&self) -> Result<usize, ImportError> {
        let count = self.count("num_hidden_layers", "the number of layers")?;
        usize::try_from(count).ok().filter(|&count| count <= MAX_LAYERS).ok_or_else(|| ImportError::Value {
            field: self.path("num_hidden_layers"),
            found: count.to_string(),
            expected: format!("at most {MAX_LAYERS}"),
        })
    }

    /// A whole number from 0, or `None` where the field is absent or null.
    pub(super) fn optional_number(&self, field: &str) -> Result<Option<u32>, ImportError> {
        self.get(field)
            .map(|found| {
                number(found).ok_or_else(|| self.value(field, found, "a whole number up to 1048576"))
            })
            .transpose()
    }

    /// A switch, or `None` where the field is absent or null.
    pub(super) fn switch(&self, field: &str) -> Result<Option<bool>, ImportError> {
        self.get(field)
            .map(|found| found.as_bool().ok_or_else(|| self.value(field, found, "true or false")))
            .transpose()
    }

    pub(super) fn text(&self, field: &str, what: &'static str) -> Result<&'a str, ImportError> {
        match self.get(field) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(self.value(field, other, "a text")),
            None => Err(self.missing(field, what)),
        }
    }

    /// A list of texts, or `None` where the field is absent or null.
    pub(super) fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>, ImportError> {
        let Some(found) = self.get(field) else { return Ok(None) };
        let texts = found.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        texts.map(Some).ok_or_else(|| self.value(field, found, "a list of texts"))
    }

    /// A list of whole numbers from 0, or `None` where the field is absent or null.
    pub(super) fn numbers(&self, field: &str) -> Result<Option<Vec<u32>>, ImportError> {
        let Some(found) = self.get(field) else { return Ok(None) };
        let numbers = found.as_array().and_then(|list| list.iter().map(number).collect());
        numbers.map(Some).ok_or_else(|| self.value(field, found, "a list of whole numbers"))
    }

    /// The layers' types, exactly one for each layer, or `None` where the field is absent or null.
    pub(super) fn layer_types(&self, layers: usize) -> Result<Option<Vec<&'a str>>, ImportError> {
        let Some(types) = self.texts("layer_types")? else { return Ok(None) };
        if types.len() != layers {
            return Err(self.wrong_length("layer_types", types.len(), layers));
        }
        Ok(Some(types))
    }

    /// Indices of layers, each below `layers`, in increasing order.
    pub(super) fn layer_ids(
        &self,
        field: &str,
        what: &'static str,
        layers: usize,
    ) -> Result<Vec<usize>, ImportError> {
        let ids = self.numbers(field)?.ok_or_else(|| self.missing(field, what))?;
        let ids: Vec<usize> = ids.into_iter().map(|id| id as usize).collect();
        let rising = ids.iter().zip(ids.iter().skip(1)).all(|(id, next)| id < next);
        if !rising || ids.iter().any(|&id| id >= layers) {
            return Err(ImportError::Value {
                field: self.path(field),
                found: shorten(&format!("{ids:?}")),
                expected: format!("numbers of layers below {layers}, in increasing order"),
            });
        }
        Ok(ids)
    }

    pub(super) fn wrong_length(&self, field: &str, found: usize, layers: usize) -> ImportError {
        ImportError::Value {
            field: self.path(field),
            found: format!("{found} entries"),
            expected: format!("one entry for each of the {layers} layers"),
        }
    }

    pub(super) fn unknown_layer(
        &self,
        field: &str,
        index: usize,
        found: &str,
        expected: &str,
    ) -> ImportError {
        ImportError::Value {
            field: self.path(&format!("{field}[{index}]")),
            found: shorten(found),
            expected: expected.to_owned(),
        }
    }

    /// The number format that the model computes in.
    pub(super) fn model_dtype(&self) -> Result<Dtype, ImportError> {
        let field = if self.has("dtype") || self.outer_has("dtype") { "dtype" } else { "torch_dtype" };
        let found = self.get(field).or_else(|| self.outer?.get(field)).filter(|value| !value.is_null());
        let found = found.ok_or_else(|| {
            self.missing(field, "the number format of the cache, unless the KV data type is set")
        })?;
        let dtype = found.as_str().and_then(float);
        let dtype = dtype.ok_or_else(|| self.value(field, found, "bfloat16, float16 or float32"))?;
        self.note_fact(field, dtype.name());
        Ok(dtype)
    }

    /// The number format of the cache: the caller's, or the model's own if the checkpoint does not quantise it.
    pub(super) fn kv_dtype(&self, options: &ImportOptions) -> Result<Dtype, ImportError> {
        if let Some(dtype) = options.kv_dtype {
            self.note_fact("KV data type", dtype.name());
            return Ok(dtype);
        }
        let quantisation = self.get("quantization_config").or_else(|| self.outer?.get("quantization_config"));
        for key in ["kv_cache_scheme", "kv_cache_quant_algo"] {
            if quantisation.and_then(|q| q.get(key)).is_some_and(|scheme| !scheme.is_null()) {
                return Err(ImportError::Feature {
                    field: format!("quantization_config.{key}"),
                    reason: "the checkpoint quantises the cache: set the KV data type",
                });
            }
        }
        self.model_dtype()
    }

    /// The recurrent state's number format: the caller's, the configuration's, or the reference code's fp32.
    pub(super) fn state_dtype(&self, options: &ImportOptions, field: &str) -> Result<Dtype, ImportError> {
        let dtype = match (options.state_dtype, self.get(field)) {
            (Some(dtype), _) => dtype,
            (None, None) => Dtype::Fp32,
            (None, Some(found)) => found
                .as_str()
                .and_then(float)
                .ok_or_else(|| self.value(field, found, "bfloat16, float16 or float32"))?,
        };
        self.note_fact("state data type", dtype.name());
        Ok(dtype)
    }

    /// Features that would change any architecture's geometry, but for those that this one `understands`.
    pub(super) fn refuse_shared_features(&self, understands: &[&str]) -> Result<(), ImportError> {
        for (field, reason) in [
            ("attention_chunk_size", "chunked attention is not supported"),
            ("num_kv_shared_layers", "layers that share a cache are not supported"),
            ("cla_share_factor", "layers that share a cache are not supported"),
            ("cross_attention_layers", "cross-attention layers are not supported"),
            ("index_topk_freq", "an indexer shared between layers is not supported"),
            ("index_topk_pattern", "an indexer shared between layers is not supported"),
        ] {
            let harmless = [Value::Null, Value::from(0), Value::from(false), Value::Array(Vec::new())];
            let refused = !understands.contains(&field);
            if refused && self.get(field).is_some_and(|value| !harmless.contains(value)) {
                return Err(self.feature(field, reason));
            }
        }
        Ok(())
    }

    /// What was read, as a text.
    pub(super) fn facts(&self) -> String {
        self.facts.borrow().join(", ")
    }

    /// The checkpoint's own name where the file gives a usable one.
    pub(super) fn model_name(&self, model_type: &str) -> String {
        let map = self.outer.unwrap_or(self.map);
        let path = map.get("_name_or_path").and_then(Value::as_str).unwrap_or("");
        let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or("");
        let usable = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let fits = (1..=64).contains(&name.len()) && name.bytes().all(usable);
        if fits { name.to_owned() } else { model_type.to_owned() }
    }

    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn outer_has(&self, field: &str) -> bool {
        self.outer.and_then(|outer| outer.get(field)).is_some_and(|value| !value.is_null())
    }

    pub(super) fn missing(&self, field: &str, what: &'static str) -> ImportError {
        ImportError::Missing { field: self.path(field), what }
    }

    fn value(&self, field: &str, found: &Value, expected: &str) -> ImportError {
        ImportError::Value {
            field: self.path(field),
            found: shorten(&found.to_string()),
            expected: expected.to_owned(),
        }
    }

    fn note_fact(&self, field: &str, value: &str) {
        let fact = format!("{field} {value}");
        let mut facts = self.facts.borrow_mut();
        if !facts.contains(&fact) {
            facts.push(fact);
        }
    }
}

fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|&number| number <= MAX_BLOCK_TOKENS)
}

fn float(name: &str) -> Option<Dtype> {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "bfloat16" => Some(Dtype::Bf16),
        "float16" => Some(Dtype::Fp16),
        "float32" => Some(Dtype::Fp32),
        _ => None,
    }
}
