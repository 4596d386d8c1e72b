//! Whether a bucket can be the cold tier of a server.

use kvarts_cold::Conditions;

use super::Finding;
use crate::cold_cmd;

/// Tries a bucket.
pub(super) fn look(address: &str) -> Finding {
    judge(address, cold_cmd::tried(address))
}

/// What it did: whether it keeps conditions of puts, and whether it keeps versions of objects.
fn judge(address: &str, tried: Result<(Conditions, bool), String>) -> Finding {
    let check = format!("bucket {address}");
    match tried {
        Ok((Conditions::Kept, false)) => Finding::good(check, "the bucket supports conditional puts"),
        Ok((Conditions::Kept, true)) => Finding::better(
            check,
            "the bucket supports conditional puts, and keeps versions of objects: deleted objects stay",
            "add a lifecycle rule to the bucket that deletes noncurrent versions",
        ),
        Ok((Conditions::NotKept(why), _)) => Finding::bad(
            check,
            why,
            "use another bucket, or another bucket server: a cold tier in this bucket is read-only, \
            and deletes are not acknowledged",
        ),
        Err(why) => Finding::bad(check, why, "check the address, the network and the credentials"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn a_bucket_is_judged_by_what_it_does_with_conditions_and_versions() {
        let verdict = |tried| judge("file:///b", tried).verdict;
        assert_eq!(verdict(Ok((Conditions::Kept, false))), Verdict::Good);
        assert_eq!(verdict(Ok((Conditions::Kept, true))), Verdict::Better);
        assert_eq!(verdict(Ok((Conditions::NotKept("it ignores them".to_owned()), false))), Verdict::Bad);
        assert_eq!(verdict(Err("no answer".to_owned())), Verdict::Bad);
    }
}
