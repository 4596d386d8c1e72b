//! Compaction of stores in memory.
