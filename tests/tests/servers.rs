//! Servers and nodes in this process, their clients, and what stands between them.

#[path = "../../peer/tests/common/certificates.rs"]
mod certificates;
mod elf;
mod plain;
mod proxied;
mod raw;
mod serve_batches;
mod serve_c;
mod serve_cluster;
mod serve_cluster_etcd;
mod serve_cluster_tls;
mod serve_cold;
mod serve_conformance;
mod serve_cuts;
mod serve_edges;
mod serve_flips;
mod serve_health;
mod serve_kept_tiles;
mod serve_local;
mod serve_local_hostile;
mod serve_local_late;
mod serve_local_memory;
mod serve_noise;
mod serve_origins;
mod serve_pool;
mod serve_python;
mod serve_refusals;
mod serve_scrub;
mod serve_sessions;
mod serve_tenants;
mod serve_tenants_leave;
mod serve_tenants_shares;
mod serve_tls;
mod serve_watch;
mod served;
