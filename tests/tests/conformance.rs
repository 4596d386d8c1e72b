//! Every store passes the conformance suite.

use kvarts_store::home::{HomeOptions, RuntimeChoice};
use kvarts_store::io::IoChoice;
use kvarts_tests::conformance::run_all;
use kvarts_tests::sim::{SimWorld, WorldConfig};
use kvarts_tests::stage::{HomeStage, ModelStage, SimStage, small_options};

fn on_a_real_directory(name: &str, io: IoChoice, runtime: RuntimeChoice, executors: usize) {
    let options = HomeOptions { io, runtime, store: small_options(executors), ..HomeOptions::default() };
    run_all(&HomeStage::open(name, &options).unwrap());
}

#[test]
fn the_reference_model_conforms() {
    run_all(&ModelStage::new());
}

#[test]
fn the_engine_on_the_thread_pool_conforms() {
    on_a_real_directory("pool", IoChoice::Pool, RuntimeChoice::Threads, 1);
}

#[test]
fn the_engine_on_threads_and_the_best_disk_path_here_conforms() {
    on_a_real_directory("threads", IoChoice::Auto, RuntimeChoice::Threads, 2);
}

#[test]
fn the_engine_on_the_best_runtime_here_conforms() {
    on_a_real_directory("auto", IoChoice::Auto, RuntimeChoice::Auto, 2);
}

#[test]
fn the_engine_in_the_simulation_conforms() {
    for seed in 0..3 {
        let world = SimWorld::new(seed, &WorldConfig::default());
        let stage = SimStage::open(&world, &small_options(1 + seed as usize % 2)).unwrap();
        run_all(&stage);
    }
}
