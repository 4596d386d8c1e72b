//! A bucket in memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;

use crate::bucket::{Bucket, Condition, Facts, Listed, Tag};
use crate::fault::Fault;
use crate::places::Places;
use crate::time::{BoxFuture, Time};

#[derive(Clone, Debug)]
struct Object {
    bytes: Bytes,
    version: u64,
    modified_ms: u64,
}

/// A bucket in memory.
pub struct MemoryBucket {
    time: Arc<dyn Time>,
    objects: Mutex<(BTreeMap<String, Object>, u64)>,
}

impl std::fmt::Debug for MemoryBucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("MemoryBucket").field(&self.names()).finish()
    }
}

impl MemoryBucket {
    /// An empty bucket.
    pub fn new(time: Arc<dyn Time>) -> Arc<Self> {
        Arc::new(Self { time, objects: Mutex::default() })
    }

    /// Every name.
    pub fn names(&self) -> Vec<String> {
        self.objects.lock().unwrap().0.keys().cloned().collect()
    }

    /// The bytes of an object.
    pub fn bytes(&self, name: &str) -> Option<Bytes> {
        self.objects.lock().unwrap().0.get(name).map(|object| object.bytes.clone())
    }

    /// Puts or replaces an object, unseen.
    pub fn set(&self, name: &str, bytes: Vec<u8>) {
        let mut objects = self.objects.lock().unwrap();
        objects.1 += 1;
        let object = Object { bytes: bytes.into(), version: objects.1, modified_ms: self.time.wall_ms() };
        objects.0.insert(name.to_owned(), object);
    }

    /// Takes an object away, unseen.
    pub fn take(&self, name: &str) -> Option<Bytes> {
        self.objects.lock().unwrap().0.remove(name).map(|object| object.bytes)
    }

    fn object(&self, name: &str) -> Result<Object, Fault> {
        self.objects.lock().unwrap().0.get(name).cloned().ok_or(Fault::Missing)
    }
}

fn tag(object: &Object) -> Tag {
    Tag(object.version.to_string())
}

impl Bucket for MemoryBucket {
    fn get<'a>(&'a self, name: &'a str, most: u64) -> BoxFuture<'a, Result<(Bytes, Tag), Fault>> {
        Box::pin(async move {
            let object = self.object(name)?;
            if object.bytes.len() as u64 > most {
                return Err(Fault::Length);
            }
            Ok((object.bytes.clone(), tag(&object)))
        })
    }

    fn get_range<'a>(
        &'a self,
        name: &'a str,
        range: Range<u64>,
        into: &'a Places,
    ) -> BoxFuture<'a, Result<u64, Fault>> {
        Box::pin(async move {
            let object = self.object(name)?;
            let (from, to) = (range.start as usize, range.end as usize);
            if from > to || to > object.bytes.len() {
                return Err(Fault::Length);
            }
            into.take(0, &object.bytes[from..to])?;
            Ok(range.end - range.start)
        })
    }

    fn head<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Facts, Fault>> {
        Box::pin(async move {
            let object = self.object(name)?;
            let bytes = object.bytes.len() as u64;
            Ok(Facts { bytes, tag: tag(&object), modified_ms: object.modified_ms })
        })
    }

    fn put<'a>(
        &'a self,
        name: &'a str,
        body: Vec<Bytes>,
        condition: Condition,
    ) -> BoxFuture<'a, Result<Tag, Fault>> {
        Box::pin(async move {
            let mut objects = self.objects.lock().unwrap();
            let known = objects.0.get(name).map(tag);
            let holds = match condition {
                Condition::Any => true,
                Condition::Absent => known.is_none(),
                Condition::Is(tag) => known == Some(tag),
            };
            if !holds {
                return Err(Fault::Changed);
            }
            objects.1 += 1;
            let version = objects.1;
            let object = Object { bytes: body.concat().into(), version, modified_ms: self.time.wall_ms() };
            let tag = tag(&object);
            objects.0.insert(name.to_owned(), object);
            Ok(tag)
        })
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), Fault>> {
        Box::pin(async move {
            self.take(name);
            Ok(())
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: usize,
    ) -> BoxFuture<'a, Result<Vec<Listed>, Fault>> {
        Box::pin(async move {
            let objects = self.objects.lock().unwrap();
            let from = after.unwrap_or_default();
            let behind = |name: &str| after.is_none_or(|after| name > after);
            let found = objects.0.range(from.max(prefix).to_owned()..);
            let found = found.take_while(|(name, _)| name.starts_with(prefix) || name.as_str() < prefix);
            let listed =
                found.filter(|(name, _)| name.starts_with(prefix) && behind(name)).map(|(name, object)| {
                    Listed {
                        name: name.clone(),
                        bytes: object.bytes.len() as u64,
                        modified_ms: object.modified_ms,
                    }
                });
            Ok(listed.take(most).collect())
        })
    }

    fn answered_ms(&self) -> Option<u64> {
        Some(self.time.wall_ms())
    }
}
