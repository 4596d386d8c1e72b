//! Kvarts layers landing in device memory.
