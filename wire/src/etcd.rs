//! What of etcd's interface is used, compiled from `proto/etcd/`: messages and clients.
#![allow(missing_docs, unreachable_pub, clippy::all, reason = "generated; the documentation is in proto/")]

include!("../../proto/generated/etcdserverpb.rs");
