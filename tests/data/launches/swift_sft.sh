# As ms-swift's own examples are written (examples/train/multi-gpu/deepspeed); the values are ours.
nproc_per_node=4

CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model Qwen/Qwen3-8B \
    --tuner_type lora \
    --dataset 'our/dataset#1000' \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --learning_rate 1e-4 \
    --lora_rank 16 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --gradient_accumulation_steps $(expr 32 / $nproc_per_node) \
    --max_length 4096 \
    --attn_impl flash_attn \
    --packing true \
    --system 'You are a helpful assistant.' \
    --deepspeed zero2

swift infer --adapters output/last --stream true --max_new_tokens 2048
