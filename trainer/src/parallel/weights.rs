//! The weights in the dtype of the computation, made from the weights that a rank has.

use std::rc::Rc;

use bridge::dist::Group;
use tch::{Kind, Tensor};

use super::exchange::{Buffer, Gathering};
use super::grads::{Message, tag};
use super::schedule_run::UnitRange;
use crate::Result;

/// Leaves of the graph for each piece of a rank.
#[derive(Debug)]
pub enum Weights<'a> {
    /// All are in memory for the whole step.
    Here(Vec<Rc<Vec<Tensor>>>),
    /// Those of a piece are gathered from the replicas for each use, and dropped after it.
    Gathered(Gathered<'a>),
}

/// Pieces of whose weights each replica has slices.
#[derive(Debug)]
pub struct Gathered<'a> {
    group: &'a Group,
    pieces: &'a [UnitRange],
    /// This replica's slices, f32, by parameter of the rank.
    slices: &'a [Tensor],
    buffers: &'a [Buffer],
    kind: Kind,
    now: Option<(usize, Rc<Vec<Tensor>>)>,
    next: Option<(usize, Gathering)>,
}

impl<'a> Weights<'a> {
    /// From whole parameters of the rank.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    pub fn here(pieces: &[UnitRange], params: &[Tensor], kind: Kind) -> Result<Self> {
        let leaves = |piece: &UnitRange| {
            let own: Vec<Tensor> =
                piece.params.iter().map(|at| params[*at].shallow_clone()).collect();
            Ok(Rc::new(piece.stage.leaves(&own, kind)?))
        };
        Ok(Weights::Here(pieces.iter().map(leaves).collect::<Result<_>>()?))
    }

    /// From slices; `buffers` are those of the pieces.
    #[must_use]
    pub fn gathered(
        group: &'a Group,
        pieces: &'a [UnitRange],
        slices: &'a [Tensor],
        buffers: &'a [Buffer],
        kind: Kind,
    ) -> Self {
        let (now, next) = (None, None);
        Weights::Gathered(Gathered { group, pieces, slices, buffers, kind, now, next })
    }

    /// The leaves of a piece; starts to gather those of `then`, the next one.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`], [`crate::Error::Torch`].
    pub fn leaves(&mut self, piece: usize, then: Option<usize>) -> Result<Rc<Vec<Tensor>>> {
        match self {
            Weights::Here(all) => Ok(Rc::clone(&all[piece])),
            Weights::Gathered(gathered) => gathered.leaves(piece, then),
        }
    }
}

impl Gathered<'_> {
    fn leaves(&mut self, piece: usize, then: Option<usize>) -> Result<Rc<Vec<Tensor>>> {
        let leaves = match self.now.take().filter(|(at, _)| *at == piece) {
            Some((_, leaves)) => leaves,
            None => {
                // A gather of another piece is dropped when it is complete: all replicas gather the
                // same pieces in the same order.
                let prefetched = self.next.take().filter(|(at, _)| *at == piece);
                let started = match prefetched {
                    Some((_, started)) => started,
                    None => self.start(piece)?,
                };
                let stage = &self.pieces[piece].stage;
                let flat = self.buffers[piece].unpack(&started.finish()?)?;
                let shaped = flat
                    .iter()
                    .enumerate()
                    .map(|(at, param)| Ok(param.f_view(stage.local_shape(at).as_slice())?));
                let params = shaped.collect::<Result<Vec<Tensor>>>()?;
                Rc::new(stage.leaves(&params, self.kind)?)
            }
        };
        if let (None, Some(then)) = (&self.next, then) {
            self.next = Some((then, self.start(then)?));
        }
        self.now = Some((piece, Rc::clone(&leaves)));
        Ok(leaves)
    }

    fn start(&self, piece: usize) -> Result<Gathering> {
        let of = |at: &usize| Ok(self.slices[*at].f_to_kind(self.kind)?);
        let slices = self.pieces[piece].params.iter().map(of).collect::<Result<Vec<Tensor>>>()?;
        let row = self.buffers[piece].pack_own(&slices)?;
        Gathering::start(self.group, &row, tag(piece, Message::GatherParams))
    }
}
