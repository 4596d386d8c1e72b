//! By which names a server is asked.
//!
//! A page in a browser can have a name of its own lead to 127.0.0.1, and read what answers there (DNS rebinding): a listener that only this
//! host reaches is then read by the author of the page. The browser says by which name it asks, so one that is not this host's gets
//! nothing. A listener that a network reaches was opened in plain words (`listen.open_metrics`), and is asked by any name.

use std::net::IpAddr;

/// Whether a request that names this host may be one of this host: by an address, or as `localhost`. One that names none comes from no
/// browser.
pub(super) fn is_own(host: Option<&[u8]>) -> bool {
    let Some(host) = host else { return true };
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.is_empty() || name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_localhost_are_this_host_and_other_names_are_not() {
        let is_own = |host: &str| is_own(Some(host.as_bytes()));
        for own in
            ["127.0.0.1:7441", "127.0.0.1", "localhost:7441", "LocalHost", "[::1]:7441", "10.1.2.3:80", ""]
        {
            assert!(is_own(own), "{own}");
        }
        for other in [
            "rebound.example",
            "rebound.example:7441",
            "localhost.example",
            "127.0.0.1.example:7441",
            "::1.x",
        ] {
            assert!(!is_own(other), "{other}");
        }
        assert!(super::is_own(None) && !super::is_own(Some(b"\xff")));
    }
}
