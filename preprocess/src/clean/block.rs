//! What goes round the threads of a cleaning.

use super::judged::Judged;
use crate::parcel::Parcel;
use crate::pump::Load;

/// Whole lines of one input, and what is known of them.
#[derive(Debug, Default)]
pub(super) struct Block {
    pub(super) parcel: Parcel,
    pub(super) judged: Judged,
}

impl Load for Block {
    fn parcel(&mut self) -> &mut Parcel {
        &mut self.parcel
    }

    fn reset(&mut self) {
        self.parcel.reset();
        self.judged.reset();
    }
}
