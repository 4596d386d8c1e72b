//! Whether a bucket keeps the conditions of puts: all that is promised of manifests rests on it, and servers that take the headers and
//! write all the same are told from others by trying alone.

use bytes::Bytes;
use kvarts_layout::planted;

use crate::access::Access;
use crate::bucket::{Condition, Tag};
use crate::error::ColdError;
use crate::fault::Fault;
use crate::format::names;

/// What a bucket does with conditions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Conditions {
    /// It keeps them.
    Kept,
    /// It does not, in this way: manifests must not be changed there.
    NotKept(String),
}

/// Tries it with an object that is for nothing else and stays: a put where there must be none, and one where there must be another.
/// An error where the bucket did not say.
pub async fn conditions(access: &Access) -> Result<Conditions, ColdError> {
    let is_absent = Condition::Absent;
    match put(access, is_absent.clone()).await {
        // It was there, and still is: no prober deletes it.
        Err(ColdError::Bucket(_, Fault::Changed)) => {}
        Ok(_) => match put(access, is_absent).await {
            Err(ColdError::Bucket(_, Fault::Changed)) => {}
            Ok(_) => return Ok(ignores("If-None-Match")),
            Err(error) => return refused(access, "If-None-Match", error).await,
        },
        Err(error) => return refused(access, "If-None-Match", error).await,
    }
    let (_, tag) = access.get(names::CONDITIONS, 64).await?;
    match put(access, Condition::Is(another(&tag))).await {
        // Of a tag that no object has some servers say that the object is missing.
        Err(ColdError::Bucket(_, Fault::Changed | Fault::Missing)) => Ok(Conditions::Kept),
        Ok(_) => Ok(ignores("If-Match")),
        Err(error) => refused(access, "If-Match", error).await,
    }
}

async fn put(access: &Access, condition: Condition) -> Result<Tag, ColdError> {
    access.put(names::CONDITIONS, &[Bytes::from_static(b"kvarts tries conditions here")], condition).await
}

fn ignores(header: &str) -> Conditions {
    if planted!("conditions-not-tried") {
        return Conditions::Kept;
    }
    Conditions::NotKept(format!("the bucket's server ignores the header {header} of puts"))
}

/// A conditional put was refused for good: whether that is because of its condition, a put without one says.
async fn refused(access: &Access, header: &str, error: ColdError) -> Result<Conditions, ColdError> {
    let ColdError::Bucket(_, Fault::Refused(why)) = &error else { return Err(error) };
    put(access, Condition::Any).await.map_err(|_| error.clone())?;
    Ok(Conditions::NotKept(format!("the bucket's server refuses puts with the header {header}: {why}")))
}

/// A tag of the same form that the object does not have.
fn another(tag: &Tag) -> Tag {
    let turned = |digit: char| match digit {
        '0'..='8' | 'a'..='e' => char::from_u32(digit as u32 + 1).unwrap_or(digit),
        '9' => '0',
        'f' => 'a',
        other => other,
    };
    let other: String = tag.0.chars().map(turned).collect();
    Tag(if other == tag.0 { format!("{other}0") } else { other })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_tag_has_the_form_of_the_tag_and_is_not_it() {
        for tag in ["\"09af\"", "17", "28-4711-1700000000.000000009", "", "zz", "W/\"abc\""] {
            let tag = Tag(tag.to_owned());
            assert_ne!(another(&tag), tag);
        }
        assert_eq!(another(&Tag("\"09af\"".to_owned())).0, "\"10ba\"");
    }
}
