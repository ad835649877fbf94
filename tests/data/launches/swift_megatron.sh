# As ms-swift's own examples are written (examples/megatron); the values are ours.
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron sft \
    --model Qwen/Qwen3-30B-A3B \
    --save_safetensors true \
    --tuner_type full \
    --dataset 'our/dataset' \
    --tensor_model_parallel_size 2 \
    --sequence_parallel true \
    --expert_model_parallel_size 8 \
    --moe_permute_fusion true \
    --moe_grouped_gemm true \
    --moe_aux_loss_coeff 1e-3 \
    --micro_batch_size 1 \
    --global_batch_size 32 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --packing true \
    --max_length 8192 \
    --no_save_optim true \
    --attention_backend flash
