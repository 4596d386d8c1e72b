//! Recovery of one shard.

use std::rc::Rc;

use super::log::Log;
use crate::error::Reason;
use crate::io::MetaOp;

/// What recovery found in one shard.
#[derive(Clone, Debug, Default)]
pub struct RecoveryReport {}

pub(crate) async fn recover(log: &Rc<Log>) -> Result<RecoveryReport, Reason> {
    let _ = log.driver.meta(MetaOp::MakeDir { name: log.home() }).await;
    Ok(RecoveryReport {})
}
