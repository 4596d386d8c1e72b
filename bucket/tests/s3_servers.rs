//! Buckets: what the tier asks of them, with which credentials they are asked, and what may go wrong.

mod conformance;
mod credentials;
mod faults;
mod proxy;
mod s3;
