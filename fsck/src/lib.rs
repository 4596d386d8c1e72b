//! The independent witness: offline check, repair, compaction and inspection of a Kvarts store.
