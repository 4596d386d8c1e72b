//! A store that is made before anything serves it: the members of a cluster are named by their stores.

use kvarts_layout::StoreId;
use kvarts_store::home::{self, Home, Stop};

use super::checked::Checked;
use crate::config::Config;

/// Makes the store of a configuration, as a start would, and closes it. Gives its id, and whether it was made now: one that is there stays as it
/// is, and may be in use.
pub fn init(config: &Config) -> Result<(StoreId, bool), String> {
    let stop = Stop::default();
    if let Some(id) = home::store_id(&config.directories, &stop) {
        return Ok((id, false));
    }
    // What is served, and to whom, is for the start to refuse: the file of members is still to be written.
    let alone =
        Config { tls: None, socket: None, socket_group: None, cluster: None, cold: None, ..config.clone() };
    let Checked { options, .. } = Checked::of(&alone, &stop)?;
    let home = Home::open(&options).map_err(|error| error.to_string())?;
    let id = home.store().stats().store;
    home.close().map_err(|error| error.to_string())?;
    Ok((id, true))
}
