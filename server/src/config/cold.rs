//! The cold tier's settings.

use std::time::Duration;

use super::complaint::Complaint;
use super::decided::{Decided, number, sized};
use super::form::Settings;
use crate::cold::{ColdConfig, Offer};
use crate::human;

/// The least memory of restores: that of one.
const MEMORY_LEAST: u64 = 128 << 20;
/// As much as it has by default, where requests have as much.
const MEMORY_USUAL: u64 = 256 << 20;

/// The bucket behind the disks, if one is named; without one nothing else of it can be set.
pub(super) fn cold(
    set: &Settings,
    requests_memory: u64,
    decided: &mut Decided,
) -> Result<Option<ColdConfig>, Complaint> {
    let Some(bucket) = &set.cold_bucket else {
        let others = [
            ("cold.requests", &set.cold_requests),
            ("cold.written", &set.cold_written),
            ("cold.read", &set.cold_read),
            ("cold.refresh", &set.cold_refresh),
            ("cold.memory", &set.cold_memory),
            ("cold.spill", &set.cold_spill),
            ("cold.uses", &set.cold_uses),
            ("cold.age", &set.cold_age),
            ("cold.token_bytes", &set.cold_token_bytes),
            ("cold.rate", &set.cold_rate),
            ("cold.offer", &set.cold_offer),
        ];
        return match others.into_iter().find(|(_, value)| value.is_some()) {
            Some((name, _)) => Err(Complaint::new(name, "the setting needs a cold tier: set cold.bucket")),
            None => Ok(None),
        };
    };
    if !bucket.starts_with("s3://") && !bucket.starts_with("file:///") {
        let what = format!("{bucket:?} is not valid: use s3://BUCKET/PREFIX or file:///DIRECTORY");
        return Err(Complaint::new("cold.bucket", &what));
    }
    let requests = decided.or("cold.requests", set.cold_requests.as_ref(), 1_000_000);
    let written = decided.or("cold.written", set.cold_written.as_ref(), "1 TiB");
    let read = decided.or("cold.read", set.cold_read.as_ref(), "4 TiB");
    let refresh = decided.or("cold.refresh", set.cold_refresh.as_ref(), 30);
    let usual = human::bytes(requests_memory.clamp(MEMORY_LEAST, MEMORY_USUAL));
    let memory = decided.or("cold.memory", set.cold_memory.as_ref(), usual);
    let spill = decided.or("cold.spill", set.cold_spill.as_ref(), "on");
    let uses = decided.or("cold.uses", set.cold_uses.as_ref(), 1);
    let age = decided.or("cold.age", set.cold_age.as_ref(), 600);
    let rate = decided.or("cold.rate", set.cold_rate.as_ref(), "64 MiB");
    let offer = decided.or("cold.offer", set.cold_offer.as_ref(), "off");
    let seconds = |name, text: &str, least: u32, most: u32| {
        let seconds = number::<u32>(name, text)?;
        if (least..=most).contains(&seconds) {
            return Ok(Duration::from_secs(u64::from(seconds)));
        }
        Err(Complaint::new(name, &format!("the value must be {least} to {most} seconds, not {seconds}")))
    };
    let config = ColdConfig {
        bucket: bucket.clone(),
        requests: number("cold.requests", &requests)?,
        written: sized("cold.written", &written)?,
        read: sized("cold.read", &read)?,
        refresh: seconds("cold.refresh", &refresh, 1, 3600)?,
        memory: sized("cold.memory", &memory)?,
        spill: is_on("cold.spill", &spill)?,
        uses: number("cold.uses", &uses)?,
        age: seconds("cold.age", &age, 0, 30 * 86_400)?,
        token_bytes: set.cold_token_bytes.as_ref().map(|text| sized("cold.token_bytes", text)).transpose()?,
        rate: sized("cold.rate", &rate)?,
        offer: offers(&offer)?,
    };
    if config.uses > 3 {
        return Err(Complaint::new("cold.uses", &format!("the value must be 0 to 3, not {}", config.uses)));
    }
    if config.memory < MEMORY_LEAST {
        let what = format!("the value must be at least 128 MiB, not {}", human::bytes(config.memory));
        return Err(Complaint::new("cold.memory", &what));
    }
    if config.rate == 0 {
        return Err(Complaint::new(
            "cold.rate",
            "the value must be above 0; cold.spill = \"off\" disables uploads",
        ));
    }
    Ok(Some(config))
}

fn is_on(name: &str, text: &str) -> Result<bool, Complaint> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Complaint::new(name, &format!("the value must be on or off, not {text}"))),
    }
}

fn offers(text: &str) -> Result<Offer, Complaint> {
    match (text, text.parse()) {
        ("off", _) => Ok(Offer::Never),
        ("on", _) => Ok(Offer::InTime),
        (_, Ok(tokens @ 1..)) => Ok(Offer::SoonerThan(tokens)),
        _ => {
            let what = format!(
                "the value must be off, on, or the number of tokens that an engine computes in a second, not {text}"
            );
            Err(Complaint::new("cold.offer", &what))
        }
    }
}
