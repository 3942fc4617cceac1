//! Computes completion times: queues of the servers, of the link and of the metadata server, in
//! nanoseconds of the caller's clock. Pure: the same calls return the same times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::model::StoreModel;

/// The busy times of all queues.
#[derive(Debug)]
pub(super) struct QueueModel {
    servers: Vec<Server>,
    /// When the link of this client is idle.
    link: u64,
    /// When the next request is admitted.
    gate: u64,
    /// When the metadata server is idle.
    meta: u64,
}

#[derive(Clone, Debug, Default)]
struct Server {
    /// Completion times of the requests in service; never more than its concurrency.
    busy: BinaryHeap<Reverse<u64>>,
    /// When it has transferred all their bytes.
    pipe: u64,
}

/// A part of a file that one request covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelRequest {
    pub(super) server: usize,
    pub(super) bytes: u64,
}

impl QueueModel {
    pub(super) fn new(model: &StoreModel) -> Self {
        let servers = vec![Server::default(); model.servers.count as usize];
        QueueModel { servers, link: 0, gate: 0, meta: 0 }
    }

    /// A read or write submitted at `now` that takes `latency` plus the transfer of its bytes;
    /// returns its completion time. Bytes keep servers and link busy, latency does not: so a
    /// stalled request takes a slot of its server, but no bandwidth.
    pub(super) fn transfer(
        &mut self,
        model: &StoreModel,
        piece: ModelRequest,
        now: u64,
        latency: u64,
    ) -> u64 {
        let ModelRequest { server, bytes } = piece;
        let gate = model.client.requests_per_s.map_or(0, |rate| nanos(1.0, rate));
        self.gate = self.gate.max(now).saturating_add(gate);
        self.link = self.link.max(now).saturating_add(transfer_ns(bytes, model.client.mb_per_s));
        let server = &mut self.servers[server];
        let mut start = now;
        if server.busy.len() >= model.servers.in_flight as usize
            && let Some(Reverse(free)) = server.busy.pop()
        {
            start = start.max(free);
        }
        let sent = transfer_ns(bytes, model.servers.mb_per_s);
        server.pipe = server.pipe.max(start).saturating_add(sent);
        let stream = model.servers.stream_mb_per_s.map_or(0, |rate| transfer_ns(bytes, rate));
        let transferred =
            [self.gate, self.link, server.pipe, start.saturating_add(stream)].into_iter().max();
        let done = transferred.unwrap_or(start).saturating_add(latency);
        server.busy.push(Reverse(done));
        done
    }

    /// A metadata request that starts at `start`, at or after `now`.
    pub(super) fn name(&mut self, model: &StoreModel, now: u64, start: u64, latency: u64) -> u64 {
        self.meta = self.meta.max(now).saturating_add(nanos(1.0, model.meta.per_s));
        self.meta.max(start).saturating_add(latency)
    }
}

/// The requests of a range of a file, and the server of each.
pub(super) fn pieces(
    model: &StoreModel,
    file: u64,
    offset: u64,
    len: u64,
) -> impl Iterator<Item = ModelRequest> + use<> {
    let servers = &model.servers;
    let (stripe, request) =
        (u64::from(servers.stripe_kib) << 10, u64::from(servers.request_kib) << 10);
    let count = u64::from(servers.count);
    let stripes = if servers.stripes == 0 { count } else { u64::from(servers.stripes) };
    let end = offset.saturating_add(len);
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let stripe_index = at / stripe;
        let mut until = end.min(at.saturating_add(request));
        if stripes > 1 {
            until = until.min((stripe_index + 1).saturating_mul(stripe));
        }
        let server = (file % count + stripe_index % stripes) % count;
        // fits: below the count
        let piece = ModelRequest { server: server as usize, bytes: until - at };
        at = until;
        Some(piece)
    })
}

fn transfer_ns(bytes: u64, mb_per_s: f64) -> u64 {
    nanos(bytes as f64 / 1e6, mb_per_s)
}

/// The time for `count` units at this rate per second, saturated at the end of the clock.
fn nanos(count: f64, per_s: f64) -> u64 {
    (count / per_s * 1e9) as u64
}
