# As TRL's scripts say that they are started (trl/scripts/sft.py); the values are ours.
accelerate launch --config_file zero3.yaml --num_processes 8 \
    trl/scripts/sft.py \
    --config trl_sft.yaml \
    --per_device_train_batch_size 2 \
    --dtype bfloat16 \
    --loss_type nll \
    --output_dir out
