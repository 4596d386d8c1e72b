//! What a record that is written anew says beside its blocks.

use std::sync::Arc;

use kvarts_layout::format::body::{Extension, Parent};

use crate::engine::shared::record_class::RecordClass;

/// What the new record says beside its blocks.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) class: Arc<RecordClass>,
    pub(crate) created_ms: u64,
    /// In the steps of the index; 0 for never.
    pub(crate) expires: u32,
    pub(crate) expires_ms: u64,
    pub(crate) extensions: Vec<Extension>,
    pub(crate) first_block: Option<u32>,
    pub(crate) parent: Parent,
    /// The sequence that tombstones are compared with.
    pub(crate) sequence: u64,
}
