//! The checker: what it finds, what it names and what it repairs.

mod fsck_bad_input;
mod fsck_contents;
mod fsck_crashes;
mod fsck_damage;
mod fsck_each_label;
mod fsck_encoded;
mod fsck_labels;
mod fsck_live;
mod fsck_repair;
