//! How files reach the memory of devices on this host: looked at once, at the start, before anybody needs it.

use std::time::Duration;

use kvarts_gpudirect::cufile::{self, Decision, Found, Wish};
use kvarts_gpudirect::device::cuda;

/// How long a driver may take to say what there is.
const PATIENCE: Duration = Duration::from_secs(10);

/// Looks and decides. What is missing, or does not answer, is a reason and no error, unless it was asked for by name.
pub(super) async fn decide(wish: Wish) -> Result<Decision, String> {
    let looking = tokio::task::spawn_blocking(|| {
        cufile::look(cuda::count().map(drop).map_err(|error| error.to_string()))
    });
    let found = match tokio::time::timeout(PATIENCE, looking).await {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => nothing(format!("the driver could not be asked: {error}")),
        Err(_) => nothing(format!("the driver did not answer within {} s", PATIENCE.as_secs())),
    };
    cufile::decide(&found, wish).map_err(|why| format!("device.cufile: {why}"))
}

fn nothing(why: String) -> Found {
    Found { device: Err(why), library: false, module: false, compiler: false }
}
