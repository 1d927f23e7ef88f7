// The arithmetic of one instruction-set tier. CMake compiles this file once per tier, with INFERAX_TIER the name of
// the table; everything else in it is local to the translation unit.
#include "int8.h"
#include "sampler.h"
#include "softmax.h"

namespace inferax {

extern const Kernels INFERAX_TIER = {
    .name = INFERAX_TIER_NAME,
    .block_size = SizeOfType,
    .tile_rows = TileRows,
    .matmul_scratch = MatmulScratch,
    .matmul = Matmul,
    .tile_group = TileGroup,
    .quantize = QuantizeRow,
    .multiply_tiles = MultiplyTiles,
    .tiles_scratch = kTilesScratch,
    .expand = Expand,
    .norm = NormRow,
    .finish = FinishRow,
    .gate = GateRow,
    .log_sum = LogSumRow,
    .attend_scratch = AttendScratch,
    .attend = AttendPartition,
    .merge = MergeState,
    .normalize = NormalizeRow,
    .sample_scratch = SampleScratch,
    .sample = SampleRow,
};

}  // namespace inferax
