//! The simulator: the engine over its disk, clusters whose figures can be counted, and recordings of a real engine.

mod sim_chains;
mod sim_cluster;
mod sim_disk;
mod sim_engine;
mod sim_hits;
mod sim_nodes;
mod sim_search;
