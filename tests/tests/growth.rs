//! What a request costs grows with what is asked, not with its square, and no task keeps others waiting: with as many
//! blocks as a request may have of a long session. Steps are counted; the small form of the same is row R30.

use kvarts_tests::rows::growth::SCENES;
use kvarts_tests::sim::Seed;

fn compare(what: &str, small: u64, large: u64) {
    let scene = SCENES.iter().find(|scene| scene.what == what).expect("there is such a scene");
    scene.compare(Seed(1), small, large).unwrap();
}

#[test]
fn a_read_in_layer_order_costs_steps_as_it_has_records() {
    compare("a read in layer order", 2_048, 16_384);
}

#[test]
fn a_read_in_block_order_costs_steps_as_it_has_records() {
    compare("a read in block order", 2_048, 16_384);
}

#[test]
fn two_equal_reads_in_layer_order_cost_steps_as_they_have_records() {
    compare("two equal reads in layer order", 2_048, 16_384);
}

#[test]
fn two_equal_reads_in_block_order_cost_steps_as_they_have_records() {
    compare("two equal reads in block order", 2_048, 16_384);
}

#[test]
fn a_chain_of_single_blocks_in_all_shards_is_deleted_by_one_look_at_each_footer() {
    compare("a delete of a prefix", 500, 2_000);
    compare("the footers that a delete of a prefix reads", 500, 2_000);
}

#[test]
fn a_look_for_chains_begins_at_what_was_put_and_not_at_all_that_is_here() {
    compare("a look for chains beside other records", 100, 1_500);
}

#[test]
fn a_delete_of_keys_is_cut_since_all_other_changes_wait_for_it() {
    compare("a delete of keys in all columns", 100, 800);
}

#[test]
fn what_recycled_segments_bury_needs_no_checkpoint_of_its_own() {
    compare("checkpoints of a full store in which blocks are deleted", 40, 800);
}

#[test]
fn room_in_a_full_store_costs_what_a_few_segments_hold() {
    compare("room for a few blocks in a full store", 40, 320);
}

#[test]
fn a_checkpoint_looks_at_the_records_of_its_shard() {
    compare("a checkpoint of records", 500, 4_000);
    compare("a checkpoint beside records of others", 100, 3_000);
}

#[test]
fn a_sweep_looks_at_what_is_due() {
    compare("a sweep of what has expired", 250, 2_000);
    compare("a sweep beside what lasts", 40, 320);
}

#[test]
fn a_match_looks_at_each_block_once_in_each_column() {
    compare("a match", 512, 4_096);
}
